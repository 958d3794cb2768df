"""Staging buffers of calls, which are freed although threads of a library still refer to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime.communication.group import Group


class Lingering:
    """The channel of two ranks with equal tensors, which keeps all tensors of its calls."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def all_gather(self, out: Tensor, x: Tensor, ahead: bool) -> None:
        self.kept += [out, x]
        out.copy_(torch.cat([x, x]))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        self.kept.append(x)
        out.copy_(2 * x.chunk(2)[0])


def group() -> tuple[Group, Lingering]:
    channel: Any = Lingering()
    return Group(("gpu",), (2,), (0,), 0, channel), channel


def test_gathered_parameters_leave_no_buffers() -> None:
    """Several tensors, and rows that do not lie one behind the other, arrive in a buffer."""
    for dims in ([0, 1], [1]):
        pair, channel = group()
        parts = [torch.randn(4, 6) for _ in dims]
        stored = [torch.empty(8, 6) if dim == 0 else torch.empty(4, 12) for dim in dims]
        pair.begin_gather(parts, dims, [None] * len(dims), False, into=stored)()
        for part, dim, whole in zip(parts, dims, stored, strict=True):
            assert torch.equal(whole, torch.cat([part, part], dim))
            assert part.untyped_storage().nbytes() == part.nbytes
        out, *sent = channel.kept
        assert out.untyped_storage().nbytes() == 0
        assert len(dims) == 1 or sent[0].untyped_storage().nbytes() == 0


def test_what_is_gathered_or_sent_itself_stays() -> None:
    pair, channel = group()
    part, stored = torch.randn(4, 6), torch.empty(8, 6)
    pair.begin_gather([part], [0], [None], False, into=[stored])()
    (whole,) = pair.gather_all([part], [0], [None])
    assert torch.equal(stored, torch.cat([part, part]))
    assert torch.equal(whole, stored)
    gradient = torch.randn(4, 6)
    (half,) = pair.reduce_scatter_all([gradient], [0])
    assert torch.equal(half, 2 * gradient[:2])
    assert all(tensor.untyped_storage().nbytes() for tensor in channel.kept)


def test_reduced_gradients_leave_no_buffer() -> None:
    pair, channel = group()
    gradients = [torch.randn(4, 6), torch.randn(2, 3)]
    first, second = (gradient.clone() for gradient in gradients)
    halves = pair.reduce_scatter_all(gradients, [0, 0])
    assert torch.equal(halves[0], 2 * first[:2])
    assert torch.equal(halves[1], 2 * second[:1])
    assert [tensor.untyped_storage().nbytes() for tensor in channel.kept] == [0]

"""Exchanges sequences for heads: each device gets all positions of some heads, in one call.

Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509), section 3. A device gets the key and value
heads that its query heads read. If there are fewer key heads than devices, or they do not divide
evenly, several devices get the same head, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.operators.peer_devices import Peers

Run = tuple[int, int]  # first and number


@dataclass(frozen=True)
class Heads:
    """The heads that each device gets of a tensor, and the positions that it had before.

    Attributes:
        heads: heads of each device; they may overlap.
        rows: positions of each device.
        every: number of heads of the tensor.
    """

    heads: tuple[Run, ...]
    rows: tuple[Run, ...]
    every: int

    @classmethod
    def of(cls, peers: Peers, count: int, heads: int, extent: int) -> Heads:
        """Returns the heads of a tensor with `heads` heads that is read by `count` query heads."""
        readers = peers.blocks(count)
        share = count // heads
        runs = [(at // share, (at + n - 1) // share - at // share + 1) for at, n in readers]
        return cls(tuple(runs), tuple(peers.blocks(extent)), heads)


def to_heads(tensors: Sequence[Tensor], how: Sequence[Heads], peers: Peers) -> tuple[Tensor, ...]:
    """Returns all positions of this device's heads, [..., heads, positions, width] each."""
    found: tuple[Tensor, ...] = _ToHeads.apply(how, peers, *tensors)  # type: ignore[no-untyped-call]
    return found


def to_rows(x: Tensor, how: Heads, peers: Peers) -> Tensor:
    """Returns this device's positions of all heads, of which each device has a disjoint part."""
    out: Tensor = _ToRows.apply(how, peers, x)  # type: ignore[no-untyped-call]
    return out


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: Sequence[Heads], peers: Peers, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.peers = how, peers
        return _to_heads(tensors, how, peers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_rows(gradients, ctx.how, ctx.peers)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Heads, peers: Peers, x: Tensor) -> Tensor:
        ctx.how, ctx.peers = how, peers
        return _to_rows((x,), (how,), peers)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _to_heads(gradients, (ctx.how,), ctx.peers)[0]


def _to_heads(tensors: Sequence[Tensor], how: Sequence[Heads], peers: Peers) -> tuple[Tensor, ...]:
    me, everyone = peers.index, range(peers.size)
    sent = [
        [x.narrow(-3, *each.heads[other]) for x, each in zip(tensors, how, strict=True)]
        for other in everyone
    ]
    shapes = [
        [
            (*x.shape[:-3], each.heads[me][1], each.rows[other][1], x.shape[-1])
            for x, each in zip(tensors, how, strict=True)
        ]
        for other in everyone
    ]
    parts = _dealt(sent, shapes, peers)
    return tuple(torch.cat(row, -2) for row in zip(*parts, strict=True))


def _to_rows(tensors: Sequence[Tensor], how: Sequence[Heads], peers: Peers) -> tuple[Tensor, ...]:
    me, everyone = peers.index, range(peers.size)
    sent = [
        [x.narrow(-2, *each.rows[other]) for x, each in zip(tensors, how, strict=True)]
        for other in everyone
    ]
    shapes = [
        [
            (*x.shape[:-3], each.heads[other][1], each.rows[me][1], x.shape[-1])
            for x, each in zip(tensors, how, strict=True)
        ]
        for other in everyone
    ]
    parts = _dealt(sent, shapes, peers)
    return tuple(
        _joined(row, each) for row, each in zip(zip(*parts, strict=True), how, strict=True)
    )


def _joined(parts: Sequence[Tensor], how: Heads) -> Tensor:
    """Returns the heads of all devices; a head that several devices had is summed."""
    if sum(count for _, count in how.heads) == how.every:
        return torch.cat(list(parts), -3)
    first = parts[0]
    result = first.new_zeros((*first.shape[:-3], how.every, *first.shape[-2:]))
    for part, run in zip(parts, how.heads, strict=True):
        result.narrow(-3, *run).add_(part)
    return result


def _dealt(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], peers: Peers
) -> list[list[Tensor]]:
    """Returns the tensors that each device sends to this one, in one call, given their shapes."""
    sizes = [[torch.Size(shape).numel() for shape in row] for row in shapes]
    taken = peers.deal(sent, [sum(row) for row in sizes])()
    return [
        sent[other]
        if other == peers.index
        else [part.view(shape) for part, shape in zip(row.split(size), each, strict=True)]
        for other, (row, size, each) in enumerate(zip(taken, sizes, shapes, strict=True))
    ]

"""Linears that overlap with gathering their input or scattering their output.

If the devices of a group can read one another's memory, torch's operators do both, rank by rank;
see `autopar/ir/fusion/async_tensor_parallel.py`. Elsewhere, above all on CPUs, they run one after
the other.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import torch_private
from autopar.runtime.communication.group import Group
from autopar.runtime.ranks.shared import backend


def reach_one_another(group: Group) -> bool:
    """Returns whether the devices of a group can read one another's memory; all ranks call it.

    They are distinct devices of one host that all processes can access.
    """
    if backend() != "nccl" or group.size == 1:
        return False
    own = torch.cuda.current_device()
    seen = [
        peer
        for peer in range(torch.cuda.device_count())
        if peer != own and torch.cuda.can_device_access_peer(own, peer)
    ]
    places = group.calls.all_gather_object((socket.gethostname(), own, seen))
    pairs = itertools.permutations(places, 2)
    return all(host == other and peer in seen for (host, _, seen), (other, peer, _) in pairs)


class GroupProducts:
    """Matrix products with a collective of a group before or after them.

    Args:
        group: at least two ranks.
        dim: the split dimension, not the last one.
        direct: whether the devices can read one another's memory.
    """

    def __init__(self, group: Group, dim: int, direct: bool) -> None:
        self.group, self.dim, self.direct = group, dim, direct

    def gathered(self, x: Tensor, matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns x of all ranks, and its products with [in, out] matrices."""
        if not self.direct:
            whole = self.group.gather(x, self.dim)
            return whole, [whole @ matrix for matrix in matrices]
        whole, products = torch_private.all_gather_matmul(
            x.contiguous(), matrices, self.dim, self.group.calls.handle
        )
        # Rows are ordered by rank, whatever dimensions precede them.
        return whole, [product.contiguous() for product in products]

    def scattered(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Returns this rank's rows of the sum of the products over ranks."""
        if not self.direct:
            return self.group.reduce_scatter(x @ matrix, self.dim)
        rows = torch_private.matmul_reduce_scatter(x, matrix, self.dim, self.group.calls.handle)
        return rows.contiguous()


class _Gathered(torch.autograd.Function):
    """Linears of a gathered input; backwards its gradient is scattered as it is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: GroupProducts, *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        half = len(operands) // 2
        weights = [weight for weight in operands[:half] if weight is not None]
        whole, products = group.gathered(x, [weight.t() for weight in weights])
        ctx.save_for_backward(whole, *weights)
        ctx.group = group
        return tuple(_plus(*pair) for pair in zip(products, operands[half:], strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        into, wanted = None, ctx.needs_input_grad[2:]
        if ctx.needs_input_grad[0]:  # the sum of all products, computed as one
            given = torch.cat(gradients, -1) if len(gradients) > 1 else gradients[0]
            stacked = torch.cat(weights) if len(weights) > 1 else weights[0]
            into = ctx.group.scattered(given, stacked)
        half = len(weights)
        of_weights = (
            _of_weight(gradient, whole) if wants else None
            for gradient, wants in zip(gradients, wanted[:half], strict=True)
        )
        of_biases = (
            _of_bias(gradient) if wants else None
            for gradient, wants in zip(gradients, wanted[half:], strict=True)
        )
        return (into, None, *of_weights, *of_biases)


class _Scattered(torch.autograd.Function):
    """A linear whose result is scattered; backwards its gradient is gathered as it is used."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: GroupProducts, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _plus(group.scattered(x, weight.t()), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole, (into,) = ctx.group.gathered(gradients[0], [weight])
        of_weight = _of_weight(whole, x) if ctx.needs_input_grad[2] else None
        of_bias = _of_bias(whole) if ctx.needs_input_grad[3] else None
        return into, None, of_weight, of_bias


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x.add_(bias)


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def _of_bias(gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).sum(0)


def gathered_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: GroupProducts
) -> tuple[Tensor, ...]:
    """Returns `F.linear` of the parts of x of all ranks with each weight and bias.

    The gradient of x is the sum over ranks.
    """
    results: tuple[Tensor, ...] = _Gathered.apply(x, group, *weights, *biases)  # type: ignore[no-untyped-call]
    return results


def scattered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: GroupProducts
) -> Tensor:
    """Returns this rank's part of the sum over ranks of `F.linear(x, weight)`, plus the bias once.

    The gradient of the bias is that of the whole, on every rank.
    """
    result: Tensor = _Scattered.apply(x, group, weight, bias)  # type: ignore[no-untyped-call]
    return result

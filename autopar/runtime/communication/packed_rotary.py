"""Rotary embedding and the exchange of rows for heads behind it, without a copy between the two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.operators import kernels
from autopar.runtime.communication.group import Group


class _Exchanged(torch.autograd.Function):
    """Forwards the kernel writes what is sent, backwards its inverse reads what arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.group = group
        packed = kernels.rotary_pack(x, cos, sin, group.size)
        return _sent(packed, group).flatten(0, 1).transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradients[0].transpose(0, 1).contiguous()
        packed = _sent(rows.unflatten(0, (ctx.group.size, -1)), ctx.group)
        return kernels.rotary_unpack(packed, *ctx.saved_tensors), None, None, None


def _sent(blocks: Tensor, group: Group) -> Tensor:
    """Block r of every rank on rank r, in the order of ranks."""
    out = torch.empty_like(blocks)
    group.calls.all_to_all(out, blocks)
    return out


def exchanged(x: Tensor, cos: Tensor, sin: Tensor, group: Group) -> Tensor:
    """(batch, all rows, heads of this rank, width) of (batch, own rows, all heads, width), rotated.

    Both rows and heads divide by the size of the group. cos and sin are those of the own rows.
    """
    if group.size == 1:
        return kernels.rotary(x, cos, sin)
    found: Tensor = _Exchanged.apply(x, cos, sin, group)  # type: ignore[no-untyped-call]
    return found

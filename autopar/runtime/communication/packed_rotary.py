"""Rotary embedding fused with the following exchange of rows for heads, without a copy between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.operators import kernels
from autopar.runtime.communication.group import Group


class _Exchanged(torch.autograd.Function):
    """The kernel writes the send buffer; backwards its inverse reads the receive buffer."""

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
    """Sends block r of every rank to rank r; returns them ordered by rank."""
    out = torch.empty_like(blocks)
    group.calls.all_to_all(out, blocks)
    return out


def exchanged(x: Tensor, cos: Tensor, sin: Tensor, group: Group) -> Tensor:
    """Rotates x and exchanges its rows for heads.

    x is (batch, own rows, all heads, width), the result (batch, all rows, own heads, width).

    The size of the group divides rows and heads. cos and sin belong to this rank's rows.
    """
    if group.size == 1:
        return kernels.rotary(x, cos, sin)
    result: Tensor = _Exchanged.apply(x, cos, sin, group)  # type: ignore[no-untyped-call]
    return result

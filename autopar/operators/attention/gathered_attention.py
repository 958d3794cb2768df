"""Attention over keys and values that are gathered for it, forwards and again backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.partial_attention import (
    Attention,
    partial_attention,
    partial_gradients,
)
from autopar.operators.attention.ring_attention import Ring, packed, unpacked
from autopar.operators.attention.sequences import length
from autopar.operators.peer_devices import widened


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Attention, ring: Ring
) -> Tensor:
    """Returns attention of this device's queries over the keys of all devices.

    Args:
        query: [..., heads, queries, width].
        key, value: this device's keys, [..., heads, keys, width].
        mask: of this device's queries and all keys, broadcast; None for none.
        how: what is computed.
        ring: the devices, with contiguous positions.
    """
    out: Tensor = _GatheredAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, how, ring
    )
    return out


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        how: Attention,
        ring: Ring,
    ) -> Tensor:
        keys, values = _gathered(key, value, ring)
        out, lse = partial_attention(query, keys, values, mask, how, _first(ring))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, lse)
        ctx.how, ctx.ring = how, ring
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        keys, values = _gathered(key, value, ring)
        given = widened(gradients[0])
        after = lse, given, (given * out).sum(-1, keepdim=True), out
        found = partial_gradients((query, keys, values), mask, ctx.how, _first(ring), after)
        rows = []
        for device in ring.keys:
            ((start, count),) = device
            keys, values = (x.narrow(-2, start, count) for x in (found.key, found.value))
            rows.append(packed(keys, values, ring.longest()))
        own = ring.peers.sum_parts(torch.stack(rows))
        count = length(ring.keys[ring.peers.index])
        into_key, into_value = unpacked(own, (key, value), ring.longest(), count)
        into_mask = None if found.mask is None or not ctx.needs_input_grad[3] else found.mask
        return (
            found.query.to(query.dtype),
            into_key.to(key.dtype),
            into_value.to(value.dtype),
            None if into_mask is None else into_mask.to(mask.dtype),
            None,
            None,
        )


def _gathered(key: Tensor, value: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of all devices, in the order of their positions."""
    rows = ring.peers.stack(packed(key, value, ring.longest()))
    order = ring.peers.order_of_blocks()
    blocks = [
        unpacked(rows[row], (key, value), ring.longest(), length(runs))
        for row, runs in zip(order, ring.keys, strict=True)
    ]
    keys, values = (torch.cat(parts, -2) for parts in zip(*blocks, strict=True))
    return keys, values


def _first(ring: Ring) -> int:
    """Returns the position of this device's first query."""
    return ring.queries[ring.peers.index][0][0]

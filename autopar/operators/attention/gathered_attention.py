"""Attention over keys and values that are gathered for it, forwards and again backwards."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.partial_attention import Attention
from autopar.operators.attention.ring_attention import Ring, Turn, packed, unattended, unpacked
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
        out, lse = unattended(query, key, value, how)
        part = Turn(query, *_gathered(key, value, ring), mask, how, _cut(ring), 0)
        part.attend(out, lse)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, lse)
        ctx.how, ctx.ring = how, ring
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        part = Turn(query, *_gathered(key, value, ring), mask, ctx.how, _cut(ring), 0)
        given = widened(gradients[0])
        after = lse, given, (given * out).sum(-1, keepdim=True), out
        sums = [torch.zeros_like(x, dtype=given.dtype) for x in (query, part.key, part.value)]
        additive = ctx.needs_input_grad[3]
        into_mask = torch.zeros_like(mask, dtype=given.dtype) if additive else None
        part.differentiate(after, (*sums, into_mask))
        rows = []
        for device in ring.keys:
            ((start, count),) = device
            keys, values = (x.narrow(-2, start, count) for x in sums[1:])
            rows.append(packed(keys, values, ring.longest()))
        own = ring.peers.sum_parts(torch.stack(rows))
        count = length(ring.keys[ring.peers.index])
        into_key, into_value = unpacked(own, (key, value), ring.longest(), count)
        return (
            sums[0].to(query.dtype),
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


def _cut(ring: Ring) -> Ring:
    """Returns the ring whose one turn has all keys, cut where this device's queries begin and end.

    A causal mask then hides nothing of the first part, half of the second, and the third.
    """
    ((first, count),) = ring.queries[ring.peers.index]
    every = sum(map(length, ring.keys))
    edges = sorted({0, min(first, every), min(first + count, every), every})
    runs = tuple((low, high - low) for low, high in pairwise(edges))
    return replace(ring, keys=[runs] * ring.peers.size)

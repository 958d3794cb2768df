"""Attention under a mask, with devices balanced by pairs of queries and keys, not by queries.

If documents are packed into a row, some queries attend to many keys and others to few. The queries
are cut into blocks, which are distributed by the work of the range of keys that each reads: the
largest block first, to the device with the least work so far. The results return to
the devices of the queries. The call that distributes queries also sends keys and values to all
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.document_lengths import dealt as dealt_blocks
from autopar.operators.attention.mask_blocks import visible
from autopar.operators.attention.part_sums import GradientSum, Result
from autopar.operators.attention.partial_attention import (
    Attention,
    partial_attention,
    partial_gradients,
)
from autopar.operators.attention.ring_attention import Ring
from autopar.operators.attention.sequences import Order, Parcel, Run, dealt, length
from autopar.operators.attention.sink_attention import add_sinks, sink_gradients
from autopar.operators.peer_devices import Peers


def shares(spans: Sequence[Run], count: int) -> Order:
    """Returns the queries of each device, balanced by the numbers of their keys.

    Args:
        spans: first key and end of the keys to which each query attends.
        count: number of devices.
    """
    return dealt_blocks(len(spans), lambda run: _work(spans, run), count)


def span(spans: Sequence[Run], run: Run) -> Run:
    """Returns first key and end of the keys to which some queries attend; (0, 0) for none."""
    own = [(low, high) for low, high in spans[run[0] : sum(run)] if low < high]
    return (min(low for low, _ in own), max(high for _, high in own)) if own else (0, 0)


def _work(spans: Sequence[Run], run: Run) -> int:
    low, high = span(spans, run)
    return run[1] * (high - low)


def balanced_attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    how: Attention,
    ring: Ring,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention of this device's queries over the keys of all devices.

    Args:
        tensors: queries, keys and values, [..., heads, positions, width].
        mask: whether this device's queries attend to each key, [..., queries, keys].
        how: options of attention.
        ring: the devices, with contiguous positions.
        sinks: one logit per head of the queries; None for none.
    """
    out: Tensor = _BalancedAttention.apply(  # type: ignore[no-untyped-call]
        *tensors, mask, how, ring, sinks
    )
    return out


class _BalancedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        how: Attention,
        ring: Ring,
        sinks: Tensor | None,
    ) -> Tensor:
        peers, rows, columns = ring.peers, ring.queries, ring.keys
        keys = sum(map(length, columns))
        own_parts = key, value
        order = shares(_spans(mask, peers, sum(map(length, rows))), peers.size)
        every: Order = [((0, keys),)] * peers.size
        query, key, value, mask = dealt(
            [
                Parcel(query, rows, order),
                Parcel(key, columns, every),
                Parcel(value, columns, every),
                Parcel(mask, rows, order),
            ],
            peers,
        )()
        parts, blocks = Result(query, key, value, how), visible(mask, query.shape[-2], keys)
        for block in blocks:
            part = block.of(query, key, value)
            own = replace(how, causal=block.kind == "causal")
            parts.add(block.rows, *partial_attention(*part, block.cut(mask), own, 0))
        out, lse = add_sinks(*parts.total(), sinks)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, *own_parts, mask, result, lse, sinks)
        ctx.how, ctx.ring, ctx.blocks, ctx.orders = how, ring, blocks, (order, every)
        return dealt([Parcel(result, order, rows)], peers)()[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse, sinks = ctx.saved_tensors
        (order, every), peers = ctx.orders, ctx.ring.peers
        rows, columns = ctx.ring.queries, ctx.ring.keys
        given, keys, values = dealt(
            [
                Parcel(gradients[0], rows, order),
                Parcel(key, columns, every),
                Parcel(value, columns, every),
            ],
            peers,
        )()
        sums = [GradientSum(x) for x in (query, keys, values)]
        for block in ctx.blocks:
            part = block.of(query, keys, values)
            near = [x.narrow(-2, *block.rows) for x in (lse, given, out)]
            own = replace(ctx.how, causal=block.kind == "causal")
            found = partial_gradients(part, block.cut(mask), own, 0, near)
            sums[0].add(block.rows, found.query)
            sums[1].add(block.columns, found.key)
            sums[2].add(block.columns, found.value)
        home = [Parcel(sums[0].total().to(query.dtype), order, rows)]
        home += [Parcel(total.total(), every, columns) for total in sums[1:]]
        into, into_key, into_value = dealt(home, peers)()
        owed = sink_gradients(sinks, lse, given, out)
        return into, into_key.to(key.dtype), into_value.to(value.dtype), None, None, None, owed


def _spans(mask: Tensor, peers: Peers, size: int) -> list[Run]:
    """Returns first key and end of the keys of each query of all devices, over the batch."""
    seen = mask.reshape(-1, *mask.shape[-2:]).any(0).int()
    some, keys = seen.amax(-1), mask.shape[-1]
    ends = torch.stack([seen.argmax(-1) * some, (keys - seen.flip(-1).argmax(-1)) * some], -1)
    blocks = peers.blocks(size)
    longest = max(count for _, count in blocks)
    padded = torch.nn.functional.pad(ends, (0, 0, 0, longest - len(ends)))
    stacked = peers.stack(padded)().tolist()
    parts = (
        stacked[row][:count]
        for row, (_, count) in zip(peers.order_of_blocks(), blocks, strict=True)
    )
    return [(low, high) for part in parts for low, high in part]

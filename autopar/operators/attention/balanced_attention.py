"""Attention under a mask, with devices balanced by pairs of queries and keys, not by queries.

If documents are packed into a row, some queries attend to many keys and others to few. The queries
are cut into blocks, and each block attends to one range of keys. The blocks are distributed by
their work: the largest block first, to the device with the least work so far. The results return to
the devices of the queries. The call that distributes queries also sends keys and values to all
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.document_lengths import dealt as dealt_blocks
from autopar.operators.attention.part_sums import GradientSum, Result
from autopar.operators.attention.partial_attention import (
    Attention,
    partial_attention,
    partial_gradients,
)
from autopar.operators.attention.sequences import Order, Parcel, Run, contiguous, dealt
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
    peers: Peers,
    size: tuple[int, int],
) -> Tensor:
    """Returns attention of this device's queries over the keys of all devices.

    Args:
        tensors: queries, keys and values, [..., heads, positions, width].
        mask: whether this device's queries attend to each key, [..., queries, keys].
        how: options of attention.
        peers: the devices.
        size: number of queries and of keys of all devices.
    """
    out: Tensor = _BalancedAttention.apply(  # type: ignore[no-untyped-call]
        *tensors, mask, how, peers, size
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
        peers: Peers,
        size: tuple[int, int],
    ) -> Tensor:
        rows, columns = contiguous(peers, size[0]), contiguous(peers, size[1])
        spans = _spans(mask, peers, size[0])
        order = shares(spans, peers.size)
        every: Order = [((0, size[1]),)] * peers.size
        query, keys, values, mask = dealt(
            [
                Parcel(query, rows, order),
                Parcel(key, columns, every),
                Parcel(value, columns, every),
                Parcel(mask, rows, order),
            ],
            peers,
        )()
        out, lse = Result(query, keys, values, how).total()
        blocks = [(at, run[1], span(spans, run)) for at, run in _places(order[peers.index])]
        for at, count, (low, high) in blocks:
            if low < high:
                part = query.narrow(-2, at, count), keys[..., low:high, :], values[..., low:high, :]
                cut = mask.narrow(-2, at, count)[..., low:high]
                found = partial_attention(*part, cut, how, 0)
                for total, new in zip((out, lse), found, strict=True):
                    total.narrow(-2, at, count).copy_(new)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, lse)
        ctx.how, ctx.peers, ctx.blocks, ctx.orders = (
            how,
            peers,
            blocks,
            (rows, columns, order, every),
        )
        return dealt([Parcel(result, order, rows)], peers)()[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        rows, columns, order, every = ctx.orders
        given, keys, values = dealt(
            [
                Parcel(gradients[0], rows, order),
                Parcel(key, columns, every),
                Parcel(value, columns, every),
            ],
            ctx.peers,
        )()
        sums = [GradientSum(x) for x in (query, keys, values)]
        for at, count, (low, high) in ctx.blocks:
            if low < high:
                part = query.narrow(-2, at, count), keys[..., low:high, :], values[..., low:high, :]
                cut = mask.narrow(-2, at, count)[..., low:high]
                near = [x.narrow(-2, at, count) for x in (lse, given, out)]
                found = partial_gradients(part, cut, ctx.how, 0, near)
                sums[0].add((at, count), found.query)
                sums[1].add((low, high - low), found.key)
                sums[2].add((low, high - low), found.value)
        home = [Parcel(sums[0].total().to(query.dtype), order, rows)]
        home += [Parcel(total.total(), every, columns) for total in sums[1:]]
        into, into_key, into_value = dealt(home, ctx.peers)()
        return (
            into, into_key.to(key.dtype), into_value.to(value.dtype), None, None, None, None,
        )  # fmt: skip


def _places(runs: Sequence[Run]) -> Iterator[tuple[int, Run]]:
    """Yields the local start of each of a device's runs, with the run."""
    at = 0
    for run in runs:
        yield at, run
        at += run[1]


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

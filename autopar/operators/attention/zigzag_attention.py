"""Ring attention in zigzag order, for a sequence that is contiguous before and after.

The calls that move queries into zigzag order and results back also carry keys, values and their
gradients: the first call delivers the first two blocks, and gradients are sent directly to the
devices of the keys. With three devices or more, there are no more calls than in a plain ring:
max(2, n - 1) forwards and as many backwards. Two devices need one call before and one after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.part_sums import GradientSum, Result
from autopar.operators.attention.partial_attention import Attention
from autopar.operators.attention.ring_attention import Ring, RingStep
from autopar.operators.attention.sequence_forms import groups
from autopar.operators.attention.sequences import (
    Order,
    Parcel,
    contiguous,
    dealt,
    length,
    turned,
    zigzag,
)
from autopar.operators.attention.sink_attention import add_sinks, sink_gradients
from autopar.operators.peer_devices import Peers, widened


def zigzag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    how: Attention,
    peers: Peers,
    size: tuple[int, int],
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns causal attention of this device's queries over the keys of all devices.

    Args:
        query: [..., heads, queries, width].
        key, value: this device's keys, [..., heads, keys, width].
        how: options of attention.
        peers: the devices.
        size: number of queries and of keys of all devices.
        sinks: one logit per head of the queries; None for none.
    """
    out: Tensor = _ZigzagAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, how, peers, size, sinks
    )
    return out


class _ZigzagAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Attention,
        peers: Peers,
        size: tuple[int, int],
        sinks: Tensor | None,
    ) -> Tensor:
        ring = Ring(peers, zigzag(peers, size[0]), zigzag(peers, size[1]))
        rows, columns = contiguous(peers, size[0]), contiguous(peers, size[1])
        steps = groups(peers.size)
        first = [
            Parcel(x, columns, _read(ring, turn, steps)) for turn in steps[0] for x in (key, value)
        ]
        query, *arrived = dealt([Parcel(query, rows, ring.queries), *first], peers)()
        key, value = arrived[:2]
        parts = Result(query, key, value, how)
        for at, turns in enumerate(steps):
            wait = _next(arrived[-2:], turns, steps[at + 1 :], ring)
            for turn, keys, values in zip(turns, arrived[::2], arrived[1::2], strict=True):
                RingStep(query, keys, values, None, how, ring, turn).attend(parts)
            arrived = wait()
        out, lse = add_sinks(*parts.total(), sinks)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse, sinks)
        ctx.how, ctx.ring, ctx.size = how, ring, size
        return dealt([Parcel(result, ring.queries, rows)], peers)()[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        ring: Ring = ctx.ring
        peers = ring.peers
        rows, columns = contiguous(peers, ctx.size[0]), contiguous(peers, ctx.size[1])
        steps = groups(peers.size)
        others = [
            Parcel(x, ring.keys, _read(ring, turn, steps))
            for turn in steps[0][1:]
            for x in (key, value)
        ]
        given, *arrived = dealt([Parcel(gradients[0], rows, ring.queries), *others], peers)()
        blocks = [key, value, *arrived]
        into = GradientSum(query)
        home = [_home(x, length(columns[peers.index])) for x in (key, value)]
        ready: list[Parcel] = []
        for at, turns in enumerate(steps):
            later = steps[at + 1 :]
            wait = _next(blocks[-2:], turns, later, ring, ready)
            ready = []
            for turn, keys, values in zip(turns, blocks[::2], blocks[1::2], strict=True):
                order = ring.met(turn)
                seen = length(order[peers.index])
                pair = GradientSum(keys[..., :seen, :]), GradientSum(values[..., :seen, :])
                part = RingStep(query, keys, values, None, ctx.how, ring, turn)
                part.differentiate((lse, given, out), (into, *pair))
                ready += [
                    Parcel(x.total(), order, columns, into_own.add)
                    for x, into_own in zip(pair, home, strict=True)
                ]
            blocks = wait()
        query_home = Parcel(into.total().to(query.dtype), ring.queries, rows)
        (own,) = dealt([query_home, *ready], peers)()
        into_key, into_value = (total.total() for total in home)
        owed = sink_gradients(sinks, lse, given, out)
        return own, into_key.to(key.dtype), into_value.to(value.dtype), None, None, None, owed


def _next(
    block: Sequence[Tensor],
    turns: range,
    later: Sequence[range],
    ring: Ring,
    more: Sequence[Parcel] = (),
) -> Callable[[], list[Tensor]]:
    """Starts to forward the last block of this call, together with other messages that are ready.

    Returns a function that waits for the keys and values of the next call's turns.
    """
    if not later:
        return dealt(more, ring.peers) if more else list
    before = turned(ring.keys, turns[-1:])
    blocks = [Parcel(x, before, _read(ring, turn, later)) for turn in later[0] for x in block]
    return dealt([*blocks, *more], ring.peers)


def _read(ring: Ring, turn: int, steps: Sequence[range]) -> Order:
    """Returns the keys of a turn: those that are attended to, or all if they are forwarded."""
    every = turn == 0 or any(turn == turns[-1] for turns in steps[:-1])
    return turned(ring.keys, [turn]) if every else ring.met(turn)


def _home(x: Tensor, count: int) -> GradientSum:
    """Returns an empty sum for the gradients of this device's `count` keys or values."""
    shape = (*x.shape[:-2], count, x.shape[-1])
    return GradientSum(x, x.new_empty(shape, dtype=widened(x).dtype))

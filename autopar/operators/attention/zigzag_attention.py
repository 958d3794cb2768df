"""Ring attention in the zigzag order, of a sequence that is contiguous before and after.

The calls that bring queries into the order and results out of it also carry keys, values and their
gradients: the first brings the first two blocks, and gradients go straight to the devices that have
the keys. So there are no more calls than in a plain ring, if it has three devices or more: max(2,
n - 1) forwards and as many backwards. Two devices need a call in and one out, whatever they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.partial_attention import Attention
from autopar.operators.attention.ring_attention import Ring, Turn, unattended
from autopar.operators.attention.sequence_forms import groups
from autopar.operators.attention.sequences import (
    Parcel,
    contiguous,
    dealt,
    length,
    turned,
    zigzag,
)
from autopar.operators.peer_devices import Peers, widened


def zigzag_attention(
    query: Tensor, key: Tensor, value: Tensor, how: Attention, peers: Peers, size: tuple[int, int]
) -> Tensor:
    """Returns causal attention of this device's queries over the keys of all devices.

    Args:
        query: [..., heads, queries, width].
        key, value: this device's keys, [..., heads, keys, width].
        how: what is computed.
        peers: the devices.
        size: all queries and keys.
    """
    out: Tensor = _ZigzagAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, how, peers, size
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
    ) -> Tensor:
        ring = Ring(peers, zigzag(peers, size[0]), zigzag(peers, size[1]))
        rows, columns = contiguous(peers, size[0]), contiguous(peers, size[1])
        first = turned(ring.keys, groups(peers.size)[0])
        query, *block = dealt(
            [
                Parcel(query, rows, ring.queries),
                Parcel(key, columns, first),
                Parcel(value, columns, first),
            ],
            peers,
        )()
        own = [x.narrow(-2, 0, length(ring.keys[peers.index])) for x in block]
        out, lse = unattended(query, own[0], own[1], how)
        steps = groups(peers.size)
        for at, turns in enumerate(steps):
            wait = _next(block, turns, steps[at + 1 :], ring)
            for turn, keys, values in _split(block, turns, ring):
                Turn(query, keys, values, None, how, ring, turn).attend(out, lse)
            block = wait()
        result = out.to(query.dtype)
        ctx.save_for_backward(query, *(x.clone() for x in own), result, lse)
        ctx.how, ctx.ring, ctx.size = how, ring, size
        return dealt([Parcel(result, ring.queries, rows)], peers)()[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        peers = ring.peers
        rows, columns = contiguous(peers, ctx.size[0]), contiguous(peers, ctx.size[1])
        steps = groups(peers.size)
        others = turned(ring.keys, steps[0][1:])
        given, *rest = dealt(
            [
                Parcel(gradients[0], rows, ring.queries),
                Parcel(key, ring.keys, others),
                Parcel(value, ring.keys, others),
            ],
            peers,
        )()
        block = [torch.cat(pair, -2) for pair in zip((key, value), rest, strict=True)]
        given = widened(given)
        after = lse, given, (given * out).sum(-1, keepdim=True), out
        into = torch.zeros_like(query, dtype=given.dtype)
        home = [_home(x, peers, columns, given.dtype) for x in (key, value)]
        ready: list[Parcel] = []
        for at, turns in enumerate(steps):
            later = steps[at + 1 :]
            wait = _next(block, turns, later, ring, ready)
            sums = [torch.zeros_like(x, dtype=given.dtype) for x in block]
            for (turn, keys, values), (_, *into_block) in zip(
                _split(block, turns, ring), _split(sums, turns, ring), strict=True
            ):
                part = Turn(query, keys, values, None, ctx.how, ring, turn)
                part.differentiate(after, (into, *into_block, None))
            arrived = wait()
            block = arrived[: 2 if later else 0]
            _add(home, arrived[len(block) :])
            ready = [Parcel(x, turned(ring.keys, turns), columns) for x in sums]
        query_home = Parcel(into.to(query.dtype), ring.queries, rows)
        own, *arrived = dealt([query_home, *ready], peers)()
        _add(home, arrived)
        return own, home[0].to(key.dtype), home[1].to(value.dtype), None, None, None


def _next(
    block: Sequence[Tensor],
    turns: range,
    later: Sequence[range],
    ring: Ring,
    more: Sequence[Parcel] = (),
) -> Callable[[], list[Tensor]]:
    """Starts to send the last of this call's blocks on, with what else is ready.

    What is returned waits for the blocks of the next call, and then for the rest.
    """
    if not later:
        return dealt(more, ring.peers) if more else list
    last = length(ring.keys[ring.source(turns[-1])])
    before, after = turned(ring.keys, turns[-1:]), turned(ring.keys, later[0])
    blocks = [x.narrow(-2, x.shape[-2] - last, last) for x in block]
    return dealt([*(Parcel(x, before, after) for x in blocks), *more], ring.peers)


def _split(
    block: Sequence[Tensor], turns: range, ring: Ring
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (turn, keys, values) of the blocks of one call."""
    at = 0
    for turn in turns:
        size = length(ring.keys[ring.source(turn)])
        yield turn, block[0].narrow(-2, at, size), block[1].narrow(-2, at, size)
        at += size


def _home(x: Tensor, peers: Peers, order: Any, dtype: torch.dtype) -> Tensor:
    """Returns zeros for the gradient of this device's own keys or values."""
    shape = (*x.shape[:-2], length(order[peers.index]), x.shape[-1])
    return x.new_zeros(shape, dtype=dtype)


def _add(sums: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """Adds gradients that have come to this device's keys and values, if any have."""
    for total, part in zip(sums, more, strict=False):
        total.add_(part)

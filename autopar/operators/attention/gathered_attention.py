"""Attention over gathered keys and values; the backward gathers them again.

Keys and values are sent in one buffer with a row for each position, so the rows of all devices
arrive in the order of the devices. Under a causal mask, a device attends to its own keys while the
others arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.part_sums import GradientSum, Result
from autopar.operators.attention.partial_attention import Attention, row_maxima
from autopar.operators.attention.ring_attention import Ring, RingStep
from autopar.operators.attention.sequences import Run, length
from autopar.operators.attention.sink_attention import add_sinks, sink_gradients


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    how: Attention,
    ring: Ring,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention of this device's queries over the keys of all devices.

    Args:
        query: [..., heads, queries, width].
        key, value: this device's keys, [..., heads, keys, width].
        mask: mask of this device's queries and all keys, broadcast; None for none.
        how: options of attention.
        ring: the devices, with contiguous positions.
        sinks: one logit per head of the queries; None for none.
    """
    out: Tensor = _GatheredAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, how, ring, sinks
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
        sinks: Tensor | None,
    ) -> Tensor:
        parts, masks = Result(query, key, value, how), (mask, row_maxima(mask))
        for turn, _ in _Rows(key, value, ring).turns(query, masks, how):
            turn.attend(parts)
        out, lse = add_sinks(*parts.total(), sinks)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, *masks, result, lse, sinks)
        ctx.how, ctx.ring = how, ring
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, most, out, lse, sinks = ctx.saved_tensors
        ring: Ring = ctx.ring
        rows = _Rows(key, value, ring)
        additive = ctx.needs_input_grad[3]
        into_mask = torch.zeros_like(mask, dtype=lse.dtype) if additive else None
        into, met = GradientSum(query), 0
        owed = lse.new_empty((sum(map(length, ring.keys)), rows.width))
        for turn, run in rows.turns(query, (mask, most), ctx.how):
            pair = [GradientSum(x, x) for x in rows.opened(owed.narrow(0, *run))]
            turn.differentiate((lse, gradients[0], out), (into, pair[0], pair[1]), into_mask)
            for part in pair:
                part.total()
            met = max(met, sum(run))
        owed[met:].zero_()
        own = ring.peers.sum_parts(rows.of_each(owed))
        into_key, into_value = rows.opened(own[: key.shape[-2]])
        return (
            into.total().to(query.dtype),
            into_key.to(key.dtype),
            into_value.to(value.dtype),
            None if into_mask is None else into_mask.to(mask.dtype),
            None,
            None,
            sink_gradients(sinks, lse, gradients[0], out),
        )


@dataclass(frozen=True)
class _Rows:
    """A device's keys and values in the layout of the gather: a row for each position.

    Attributes:
        key, value: [..., heads, keys, width].
        ring: the devices.
    """

    key: Tensor
    value: Tensor
    ring: Ring

    @property
    def width(self) -> int:
        """Returns the elements of a row."""
        return sum(math.prod(x.shape[:-2]) * x.shape[-1] for x in (self.key, self.value))

    def turns(
        self, query: Tensor, masks: tuple[Tensor | None, Tensor | None], how: Attention
    ) -> Iterator[tuple[RingStep, Run]]:
        """Yields the turns of a device, with the positions of the keys of each.

        Args:
            query: this device's queries.
            masks: their mask, and the largest elements of its rows, as in `row_maxima`.
            how: options of attention.
        """
        ring, (mask, most) = self.ring, masks
        me, size = ring.peers.index, ring.peers.size
        sent = self.key.new_empty((ring.longest(), self.width))
        for x, part in zip(
            (self.key, self.value), self.opened(sent[: self.key.shape[-2]]), strict=True
        ):
            part.copy_(x)
        wait = ring.peers.stack(sent)
        run = 0, sum(map(length, ring.keys))
        if how.causal and ring.keys[me] == ring.queries[me]:
            yield RingStep(query, self.key, self.value, mask, how, ring, 0, most), ring.keys[me][0]
            run = 0, ring.keys[me][0][0]  # keys of earlier devices
            ring = replace(ring, keys=[(run,)] * size)
        else:
            ring = _cut(ring)
        stacked = wait()
        if run[1]:
            keys, values = self.opened(self._in_order(stacked)[: run[1]])
            if query.is_cpu:  # whose kernel is 10 % slower if keys and values are interleaved
                keys, values = keys.contiguous(), values.contiguous()
            yield RingStep(query, keys, values, mask, how, ring, 0, most), run

    def opened(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of the keys and values in rows."""
        first = math.prod(self.key.shape[:-2]) * self.key.shape[-1]
        keys, values = (
            part.unflatten(1, (*x.shape[:-2], x.shape[-1])).movedim(0, -2)
            for x, part in zip((self.key, self.value), rows.tensor_split([first], 1), strict=True)
        )
        return keys, values

    def of_each(self, rows: Tensor) -> Tensor:
        """Returns the rows of each device, [devices, longest part, width]."""
        ring, longest = self.ring, self.ring.longest()
        if len(rows) == longest * ring.peers.size:
            return rows.view(ring.peers.size, longest, self.width)
        parts = rows.new_zeros((ring.peers.size, longest, self.width))
        for part, own in zip(parts, rows.split([length(runs) for runs in ring.keys]), strict=True):
            part[: len(own)] = own
        return parts

    def _in_order(self, stacked: Tensor) -> Tensor:
        """Returns the rows of all devices in the order of their positions."""
        order, counts = self.ring.peers.order_of_blocks(), [length(runs) for runs in self.ring.keys]
        if list(order) == sorted(order) and min(counts) == self.ring.longest():
            return stacked.flatten(0, 1)
        return torch.cat([stacked[at][:count] for at, count in zip(order, counts, strict=True)])


def _cut(ring: Ring) -> Ring:
    """Returns a ring with one turn of all keys, cut at both ends of this device's queries.

    A causal mask then hides nothing of the first part, half of the second, and all of the third.
    """
    ((first, count),) = ring.queries[ring.peers.index]
    every = sum(map(length, ring.keys))
    edges = sorted({0, min(first, every), min(first + count, every), every})
    runs = tuple((low, high - low) for low, high in pairwise(edges))
    return replace(ring, keys=[runs] * ring.peers.size)

"""Ring attention: keys and values travel around the devices, each of which keeps its queries.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context"
(arXiv:2310.01889), section 3: while a device computes on one block, it sends the block to the next
device. Forwards, a block makes n - 1 hops, or fewer if no later device attends to it. Backwards, it
makes these hops again, and the sum of the gradients of its keys and values follows one turn behind.
The first turn's gradients are computed on the block's own device and stay there. The sum starts at
the second device and returns from the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.block_pairs import BlockPair, joined
from autopar.operators.attention.mask_blocks import visible
from autopar.operators.attention.part_sums import GradientSum, Result
from autopar.operators.attention.partial_attention import (
    Attention,
    partial_attention,
    partial_gradients,
    row_maxima,
)
from autopar.operators.attention.sequences import Order, Run, contiguous, length
from autopar.operators.attention.sink_attention import add_sinks, sink_gradients
from autopar.operators.peer_devices import Peers, flattened


@dataclass(frozen=True)
class Ring:
    """The devices of a ring, and the positions that each has of the queries and of the keys."""

    peers: Peers
    queries: Order
    keys: Order

    @classmethod
    def of_parts(cls, peers: Peers, size: tuple[int, int]) -> Ring:
        """Returns the ring of devices with contiguous parts of so many queries and keys."""
        return cls(peers, contiguous(peers, size[0]), contiguous(peers, size[1]))

    def source(self, turn: int, device: int | None = None) -> int:
        """Returns the device whose keys a device, by default this one, has in a turn."""
        return ((self.peers.index if device is None else device) - turn) % self.peers.size

    def longest(self) -> int:
        """Returns the number of keys of the longest part."""
        return max(map(length, self.keys))

    def reach(self, causal: bool) -> list[int]:
        """Returns for each device the last turn in which a query attends to one of its keys."""
        size = self.peers.size
        found = []
        for source in range(size):
            seen = (t for t in range(size) if self.meetings(t, causal, (source + t) % size))
            found.append(max(seen, default=0) if causal else size - 1)
        return found

    def passed(
        self, row: Tensor, to: Callable[[int], int | None]
    ) -> Callable[[], dict[int, Tensor]]:
        """Starts to send rows of equal lengths.

        Args:
            row: the row that this device sends, or any row of this length if it sends none.
            to: returns the receiver of a device's row; None if the device sends none.

        Returns:
            A function that waits for the rows that arrive here, by sender.
        """
        size, me = self.peers.size, self.peers.index
        senders = [device for device in range(size) if to(device) == me]
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        target = to(me)
        sent[me if target is None else target] = [row[:0] if target is None else row]
        takes = [row.numel() if device in senders else 0 for device in range(size)]
        wait = self.peers.deal(sent, takes)

        def arrive() -> dict[int, Tensor]:
            rows = wait()
            return {sender: rows[sender] for sender in senders}

        return arrive

    def met(self, turn: int) -> Order:
        """Returns the keys of a turn up to the last one that a causal mask leaves to a query."""
        order: Order = []
        for device in range(self.peers.size):
            meetings = self.meetings(turn, True, device)
            end = max((sum(meeting.columns) for meeting in meetings), default=0)
            runs: list[Run] = []
            for start, size in self.keys[self.source(turn, device)]:
                runs += [(start, min(size, end))] if end > 0 else []
                end -= size
            order.append(tuple(runs))
        return order

    def meetings(self, turn: int, causal: bool, device: int | None = None) -> list[BlockPair]:
        """Returns the pairs of query and key ranges of a turn on a device, by default this one."""
        own = self.queries[self.peers.index if device is None else device]
        keys = self.keys[self.source(turn, device)]
        if causal and own == keys == tuple(sorted(own)):  # the order of keys is that of queries
            every = 0, length(own)
            return [BlockPair(every, every, 0, own[0][0])]
        found: list[BlockPair] = []
        at = 0
        for first, count in own:
            to = 0
            for start, size in keys:
                ahead = first - start
                if not causal or ahead + count > 0:
                    cut = causal and ahead < size - 1
                    found.append(BlockPair((at, count), (to, size), ahead if cut else None, start))
                to += size
            at += count
        return joined(found)


def ring_attention(
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
        ring: the devices.
        sinks: one logit per head of the queries; None for none.
    """
    out: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, how, ring, sinks
    )
    return out


class _RingAttention(torch.autograd.Function):
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
        parts, most = Result(query, key, value, how), row_maxima(mask)
        for turn, keys, values in _blocks(key, value, ring, how.causal):
            RingStep(query, keys, values, mask, how, ring, turn, most).attend(parts)
        out, lse = add_sinks(*parts.total(), sinks)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, most, result, lse, sinks)
        ctx.how, ctx.ring = how, ring
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, most, out, lse, sinks = ctx.saved_tensors
        how, ring = ctx.how, ctx.ring
        into, additive = GradientSum(query), ctx.needs_input_grad[3]
        into_mask = torch.zeros_like(mask, dtype=lse.dtype) if additive else None
        sums = _KeySums(key, value, ring, how.causal)
        for turn, keys, values in _blocks(key, value, ring, how.causal):
            pair = GradientSum(keys), GradientSum(values)
            part = RingStep(query, keys, values, mask, how, ring, turn, most)
            part.differentiate((lse, gradients[0], out), (into, *pair), into_mask)
            sums.add(turn, pair)
        masks = None if into_mask is None else into_mask.to(mask.dtype)
        whole = into.total(), *sums.total()
        dtypes = query.dtype, key.dtype, value.dtype
        own = (x.to(dtype) for x, dtype in zip(whole, dtypes, strict=True))
        return *own, masks, None, None, sink_gradients(sinks, lse, gradients[0], out)


@dataclass(frozen=True)
class RingStep:
    """One turn: a device's queries and one block of keys and values.

    Attributes:
        query, key, value: this device's queries, and the keys and values of one device.
        mask: mask of this device's queries and all keys; None for none.
        how: options of attention.
        ring: the devices.
        number: number of the turn; the keys come from the device that many places before.
        most: the largest elements of the rows of the mask, as in `row_maxima`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    how: Attention
    ring: Ring
    number: int
    most: Tensor | None = None

    def attend(self, result: Result) -> None:
        """Merges attention over this block into that over other blocks."""
        for meeting, cut in self._seen():
            rows, columns, ahead = meeting.rows, meeting.columns, meeting.ahead
            how = _masked(self.how, ahead)
            part = self._part(rows, columns)
            most = _cut(self.most, rows, (0, 1))
            result.add(rows, *partial_attention(*part, cut, how, ahead or 0, most))

    def differentiate(
        self,
        after: Sequence[Tensor],
        sums: tuple[GradientSum, GradientSum, GradientSum],
        into_mask: Tensor | None = None,
    ) -> None:
        """Adds the gradients from this block.

        Args:
            after: lse, gradient and result of this device's queries, as in `partial_gradients`.
            sums: the sums for the queries, and for this block's keys and values.
            into_mask: the sum for the mask, if it has a gradient.
        """
        for meeting, cut in self._seen():
            rows, columns, ahead = meeting.rows, meeting.columns, meeting.ahead
            near = [_narrow(x, rows) for x in after]
            how = _masked(self.how, ahead)
            part = self._part(rows, columns)
            most = _cut(self.most, rows, (0, 1))
            found = partial_gradients(part, cut, how, ahead or 0, near, most)
            sums[0].add(rows, found.query)
            sums[1].add(columns, found.key)
            sums[2].add(columns, found.value)
            if into_mask is not None and found.mask is not None:
                _cut_of(into_mask, rows, (meeting.start, columns[1])).add_(found.mask)

    def _seen(self) -> Iterator[tuple[BlockPair, Tensor | None]]:
        """Yields the pairs of ranges that the mask does not hide, and their part of the mask."""
        for meeting in self.ring.meetings(self.number, self.how.causal):
            cut = _cut(self.mask, meeting.rows, (meeting.start, meeting.columns[1]))
            if cut is None or cut.dtype != torch.bool:
                yield meeting, cut
                continue
            for block in visible(cut, meeting.rows[1], meeting.columns[1]):
                yield meeting.within(block), block.cut(cut)

    def _part(self, rows: Run, columns: Run) -> tuple[Tensor, Tensor, Tensor]:
        return (
            _narrow(self.query, rows), _narrow(self.key, columns), _narrow(self.value, columns),
        )  # fmt: skip


def _blocks(
    key: Tensor, value: Tensor, ring: Ring, causal: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (turn, keys, values) of all devices, this one's first, while the next are sent.

    In turns without keys for this device, the contents of the tensors are undefined.
    """
    row, reach = packed(key, value, ring.longest()), ring.reach(causal)
    last = max(reach)

    def onwards(turn: int, device: int) -> int | None:
        return (device + 1) % ring.peers.size if turn < reach[ring.source(turn, device)] else None

    for turn in range(last + 1):
        arriving = ring.passed(row, partial(onwards, turn)) if turn < last else dict
        keys, values = key, value
        if turn:
            count = length(ring.keys[ring.source(turn)])
            keys, values = unpacked(row, (key, value), ring.longest(), count)
        yield turn, keys, values
        row = next(iter(arriving().values()), row)


class _KeySums:
    """The gradients of keys and values, which follow the keys one turn behind."""

    def __init__(self, key: Tensor, value: Tensor, ring: Ring, causal: bool) -> None:
        self._like, self._ring, self._reach = (key, value), ring, ring.reach(causal)
        self._own: list[Tensor] = []
        self._turn = 0  # the last one
        self._arriving: Callable[[], dict[int, Tensor]] = dict

    def add(self, turn: int, pair: tuple[GradientSum, GradientSum]) -> None:
        """Adds the gradients of a turn, and sends the sum to the next device unless complete."""
        if turn == 0:
            self._own = [part.total() for part in pair]
            return
        ring, row = self._ring, self._arrived()
        if turn > self._reach[ring.source(turn)]:
            size = sum(x[..., :1, :].numel() for x in self._like) * ring.longest()
            row = self._own[0].new_empty(size)
        elif row is None:
            row = packed(pair[0].total(), pair[1].total(), ring.longest())
        else:
            self._add(row, pair)
        self._turn, self._arriving = turn, ring.passed(row, partial(self._to, turn))

    def total(self) -> list[Tensor]:
        """Returns the gradients of this device's own keys and values."""
        self._arrived()
        return self._own

    def _to(self, turn: int, device: int) -> int | None:
        """Returns the receiver of the gradients that a device sends after a turn."""
        source = self._ring.source(turn, device)
        if turn < self._reach[source]:
            return (device + 1) % self._ring.peers.size
        return source if turn == self._reach[source] else None

    def _arrived(self) -> Tensor | None:
        """Adds the gradients that have returned; returns the row that this device must forward."""
        onwards = None
        for sender, row in self._arriving().items():
            if self._ring.source(self._turn, sender) != self._ring.peers.index:
                onwards = row
                continue
            parts = unpacked(row, self._like, self._ring.longest(), self._own[0].shape[-2])
            for total, more in zip(self._own, parts, strict=True):
                total.add_(more)
        return onwards

    def _add(self, row: Tensor, pair: tuple[GradientSum, GradientSum]) -> None:
        count = pair[0].like.shape[-2]
        parts = unpacked(row, self._like, self._ring.longest(), count)
        for total, more in zip(parts, pair, strict=True):
            more.add_to(total)


def packed(key: Tensor, value: Tensor, longest: int) -> Tensor:
    """Returns keys and values in one row, padded to the length of the longest part."""
    missing = longest - key.shape[-2]
    parts = [torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x for x in (key, value)]
    return flattened(parts)


def unpacked(row: Tensor, like: Sequence[Tensor], longest: int, count: int) -> list[Tensor]:
    """Returns the first `count` keys and values of a row."""
    shapes = [(*x.shape[:-2], longest, x.shape[-1]) for x in like]
    parts = row.split([torch.Size(shape).numel() for shape in shapes])
    return [
        part.view(shape).narrow(-2, 0, count) for part, shape in zip(parts, shapes, strict=True)
    ]


def _masked(how: Attention, ahead: int | None) -> Attention:
    """Returns the options for a pair of ranges, causal only if the mask hides some of it."""
    return Attention(how.scale, ahead is not None, how.grouped)


def _narrow(x: Tensor, run: tuple[int, int]) -> Tensor:
    return x.narrow(-2, *run)


def _cut(mask: Tensor | None, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor | None:
    return None if mask is None else _cut_of(mask, rows, columns)


def _cut_of(mask: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Returns some rows and columns of a mask whose dimensions may be broadcast."""
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask.narrow(-2, *rows)
    return mask.narrow(-1, *columns) if mask.shape[-1] > 1 else mask

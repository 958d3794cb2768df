"""Work of attention under a mask of documents or a window, on each device and in each turn.

Prices need the blocks that `mask_blocks.py` finds in a mask, but the mask of a million positions
has 2^40 elements. Here the blocks follow from the borders of the documents.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.ir.tensor import part_of
from autopar.operators.attention.blocks import Line, Run, blocks_of
from autopar.operators.attention.document_lengths import dealt, lengths_of, rows_of, sees_later_keys
from autopar.operators.attention.sequence_forms import ROWS, seen
from autopar.operators.form import Part

_EXACT = 2**14  # longest rows of which each query is looked at; in longer ones, a few at a time


@dataclass(frozen=True)
class Mask:
    """A mask that leaves each query the keys of its document, or some of them.

    Attributes:
        size: number of queries and of keys.
        starts: first positions of the documents of each row of the batch, ascending from 0.
        causal: whether queries attend only to earlier keys.
        window: the largest number of keys of a query under a causal mask.
    """

    size: int
    starts: tuple[tuple[int, ...], ...]
    causal: bool
    window: int

    def work(self, runs: Sequence[Run], columns: Run) -> int:
        """Returns the number of pairs that attention of some queries over some keys computes."""
        lines = _joined(self._lines(runs, columns))
        return sum(block.work for block in blocks_of(lines))

    def span(self, run: Run) -> Run:
        """Returns first key and end of the keys to which some queries attend in any row."""
        first, last = run[0], sum(run) - 1
        low = min(self._document(first, row)[0] for row in self.starts)
        if self.causal:
            return max(low, first - self.window + 1), last + 1
        return low, max(self._document(last, row)[1] for row in self.starts)

    def core(self, run: Run) -> Run:
        """Returns first key and end of the keys to which all queries attend in all rows."""
        first, last = run[0], sum(run) - 1
        low = max(self._document(last, row)[0] for row in self.starts)
        if self.causal:
            return max(low, last - self.window + 1), first + 1
        return low, min(self._document(first, row)[1] for row in self.starts)

    def _document(self, at: int, starts: tuple[int, ...]) -> Run:
        """Returns first position and end of a position's document."""
        number = bisect_right(starts, at)
        return starts[number - 1], starts[number] if number < len(starts) else self.size

    @functools.cached_property
    def _borders(self) -> list[int]:
        return sorted({start for row in self.starts for start in row})

    def _lines(self, runs: Sequence[Run], columns: Run) -> Iterator[Line]:
        """Yields the lines of queries, which are numbered from 0, over some keys."""
        done = 0
        for first, count in runs:
            end = first + count
            inside = slice(bisect_right(self._borders, first), bisect_left(self._borders, end))
            for at, until in pairwise([first, *self._borders[inside], end] if count else ()):
                for line in self._stretch(at, until, columns):
                    yield replace(line, rows=(line.rows[0] - first + done, line.rows[1]))
            done += count

    def _stretch(self, at: int, until: int, columns: Run) -> Iterator[Line]:
        """Yields the lines of queries between two borders, by their positions."""
        documents = [self._document(at, row) for row in self.starts]
        low = max(columns[0], min(start for start, _ in documents))
        high = min(sum(columns), max(end for _, end in documents))
        same = all(start <= low for start, _ in documents)
        same = same and (self.causal or all(end >= high for _, end in documents))
        if not self.causal:
            yield from self._ranges((at, until), same, lambda query: (low, max(low, high)))
            return

        def seen_by(query: int) -> Run:
            least = max(low, query - self.window + 1)
            return least, max(least, min(query + 1, high))

        moves = low + self.window  # the first query that does not see the first key
        cuts = {at, until, low, high, moves, high + self.window - 1}
        for start, stop in pairwise(sorted(cut for cut in cuts if at <= cut <= until)):
            if same and start < min(moves, high) and start >= low:
                yield Line((start, stop - start), *seen_by(start), "causal")
            else:
                yield from self._ranges((start, stop), same and start < moves, seen_by)

    def _ranges(self, queries: Run, same: bool, seen_by: Callable[[int], Run]) -> Iterator[Line]:
        """Yields the lines of queries, whose ranges of keys ascend.

        Args:
            queries: first query, and the end.
            same: whether all of them, in all rows of the batch, see the same keys.
            seen_by: returns first key and end of the keys of a query.
        """
        first, end = queries
        low, high = seen_by(first)
        if same or seen_by(end - 1)[0] >= seen_by(end - 1)[1]:
            yield Line((first, end - first), low, high, "full")
            return
        step = min(ROWS, max(1, self.size // _EXACT))
        for at in range(first, end, step):
            last = min(at + step, end)
            yield Line((at, last - at), seen_by(at)[0], seen_by(last - 1)[1], "partial")


def _joined(lines: Iterable[Line]) -> Iterator[Line]:
    """Yields lines with adjacent ones joined that see the same keys."""
    last: Line | None = None
    for line in lines:
        if last is not None and line.kind == "full" and replace(line, rows=last.rows) == last:
            last = replace(last, rows=(last.rows[0], last.rows[1] + line.rows[1]))
            continue
        if last is not None:
            yield last
        last = line
    if last is not None:
        yield last


def masks_of(part: Part) -> tuple[Mask, ...]:
    """Returns masks to average over, as far as a mask is known; () if nothing is known."""
    keys, lengths = part.types[1].shape[-2], lengths_of(part.node)
    causal = not sees_later_keys(part.node, keys)
    square = (
        len(part.types) > 3 and part.types[3].dtype == "bool" and keys == part.types[0].shape[-2]
    )
    if not square or not (causal or lengths.sample):
        return ()
    batches: list[tuple[tuple[int, ...], ...]] = [((0,),)]
    if lengths.sample:
        batches = lengths.batches(keys, rows_of(part))
    # A window w leaves w (w + 1) / 2 + (n - w) w pairs of n queries and keys.
    share, twice = seen(part.node), 2 * keys + 1
    width = round((twice - math.sqrt(max(twice**2 - 8 * share * keys**2, 0.0))) / 2)
    window = max(1, min(keys, width)) if causal else keys
    return tuple(Mask(keys, starts, causal, window) for starts in batches)


def gathered_share(masks: Sequence[Mask], devices: int) -> float:
    """Returns the mean share of all keys that a query of the busiest device reads.

    The devices have contiguous parts of the queries.
    """
    return sum(_gathered(mask, devices) for mask in masks) / len(masks)


def ring_share(masks: Sequence[Mask], devices: int) -> tuple[float, float]:
    """Returns the mean share of all keys of a query's turns in a ring, and the number of turns.

    A device begins a turn once it has done the turn before, and the device before has begun that.
    So the share is that of the longest chain of turns. Turns in which no device attends to a key
    do not count.
    """
    found = [_ring(mask, devices) for mask in masks]
    shares, turns = (sum(each) / len(masks) for each in zip(*found, strict=True))
    return shares, turns


def balanced_share(masks: Sequence[Mask], devices: int) -> float:
    """Returns the mean share of all keys that a query of the busiest device reads.

    The devices have blocks of queries, distributed by the ranges of keys that these read.
    """
    return sum(_balanced(mask, devices) for mask in masks) / len(masks)


@functools.cache
def _gathered(mask: Mask, devices: int) -> float:
    works = (mask.work((part,), (0, mask.size)) for part in _parts(mask, devices))
    return max(works) * devices / mask.size**2


@functools.cache
def _ring(mask: Mask, devices: int) -> tuple[float, int]:
    parts, active = _parts(mask, devices), {0}
    ends, work = [0] * devices, [[0] * devices for _ in parts]
    for device, own in enumerate(parts):
        if not own[1]:
            continue
        (low, high), (first, end) = mask.span(own), mask.core(own)
        for source, keys in enumerate(parts):
            if keys[0] < high and low < sum(keys):
                whole = first <= keys[0] and sum(keys) <= end
                pairs = own[1] * keys[1] if whole else mask.work((own,), keys)
                work[(device - source) % devices][device] = pairs
    begun = [0] * devices
    for turn, row in enumerate(work):
        if any(row):
            active.add(turn)
        before = [begun[device - 1] for device in range(devices)] if turn else begun
        begun = [max(pair) for pair in zip(ends, before, strict=True)]
        ends = [start + more for start, more in zip(begun, row, strict=True)]
    return max(ends) * devices / mask.size**2, len(active)


@functools.cache
def _balanced(mask: Mask, devices: int) -> float:
    def work(run: Run) -> int:
        low, high = mask.span(run)
        return run[1] * (high - low)

    given = dealt(mask.size, work, devices)
    works = (mask.work(_adjacent(runs), (0, mask.size)) for runs in given)
    return max(works) * devices / mask.size**2


def _adjacent(runs: Sequence[Run]) -> list[Run]:
    """Returns ascending runs with adjacent ones joined."""
    joined: list[Run] = []
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        else:
            joined.append((first, count))
    return joined


def _parts(mask: Mask, devices: int) -> list[Run]:
    return [part_of(mask.size, devices, at) for at in range(devices)]

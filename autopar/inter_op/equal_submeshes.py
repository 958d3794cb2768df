"""Finds pipelines of equal sub-meshes whose ranks run several chunks of the model.

Interleaved, V-shaped and bidirectional schedules profit if all chunks take equally long. The layers
are therefore cut into chunks as balanced as whole layers allow, and the search only chooses the
number of stages and a strategy for each chunk.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from autopar.inter_op.search_task import Draft, Space
from autopar.inter_op.stage_prices import Floats, Ints, Table
from autopar.inter_op.stage_values import Law

Chunks = tuple[tuple[int, int, int], ...]  # row, first, last
_MOST_WAYS = 4096  # combinations of options per rank; beyond, equal chunks use the same option


@dataclass(frozen=True)
class _Way:
    """A choice of options for the chunks of one rank, with seconds as in Candidate."""

    seconds: float
    once: float
    options: tuple[int, ...]


@dataclass(frozen=True)
class _Mixed:
    """All choices of options for the chunks of one rank, by seconds, and those by seconds once.

    Attributes:
        options: [ways, chunks] option of every chunk.
        sums: [ways, 4] sums over chunks: seconds, seconds once, fixed bytes, bytes per microbatch.
        transient: [ways] largest transient bytes of a chunk.
    """

    options: Ints
    sums: Floats
    transient: Floats


@dataclass(frozen=True)
class _Shape:
    """Ranks on equal sub-meshes and their chunks.

    Attributes:
        q: index of the sub-mesh.
        ranks: the chunks of every rank, in layer order.
        rows: [ranks, chunks] signatures of the chunks.
        entering: [ranks] seconds of transfers into a rank per microbatch.
        borders: seconds of all transfers of one microbatch.
    """

    q: int
    ranks: list[Chunks]
    rows: Ints
    entering: Floats
    borders: float


class EqualSubmeshPipelines:
    """All pipelines of one law with several chunks and one number of microbatches.

    Args:
        space: the space of pipelines.
        law: law of the schedule.
        microbatches: per step.
        transfer: [layers, submesh before, submesh after] seconds to transfer one microbatch across
            the border before each layer and back.
    """

    def __init__(self, space: Space, law: Law, microbatches: int, transfer: Floats) -> None:
        self.space, self.law, self.microbatches = space, law, microbatches
        self.transfer = transfer
        self._shapes: dict[tuple[int, int], _Shape] = {}

    def best(
        self, table: Table, cutoff: float, only: int | None = None, slack: float = 0.0
    ) -> Draft | None:
        """Returns the fastest pipeline that takes less than `cutoff` seconds, None if none does.

        There are few pipelines, so the result is exact whatever `slack` allows.
        """
        shapes = [self._shape(stages, q) for stages, q in self._sizes(only)]
        found: Draft | None = None
        # The shapes with their bounds; those of a fill of 0 need no simulation of the schedule.
        queue = [(self._least(shape, table, 0.0), at, False) for at, shape in enumerate(shapes)]
        heapq.heapify(queue)
        while queue:
            least, at, final = heapq.heappop(queue)
            limit = cutoff if found is None else found.seconds
            if least >= limit:
                break
            if final:
                found = self._of(shapes[at], table, limit) or found
            else:
                fill = self.law.fill(len(shapes[at].ranks), self.microbatches)
                heapq.heappush(queue, (self._least(shapes[at], table, fill), at, True))
        return found

    rough = best

    def _sizes(self, only: int | None) -> Iterator[tuple[int, int]]:
        """Yields the pairs (stages, sub-mesh) that use all devices, none if these are unlike."""
        prices = self.space.prices
        if len(self.space.orders) > 1:
            return
        for q, size in enumerate(prices.sizes):
            stages = self.space.devices // int(size)
            exact = stages * int(size) == self.space.devices
            chunks = stages * self.law.chunks // self.law.copies
            if (
                exact
                and only in (None, stages)
                and stages <= self.space.most_stages
                and chunks <= len(prices.kinds)
                and (stages > 1 or self.law.chunks == 1)
                and self.law.fits(stages, self.microbatches)
            ):
                yield stages, q

    def _shape(self, stages: int, q: int) -> _Shape:
        """Returns the chunks of every rank, balanced by lower bounds on their seconds."""
        if (stages, q) not in self._shapes:
            law, row = self.law, self.space.prices.row
            ends = self.space.even(stages * law.chunks // law.copies, self.microbatches)
            spans = [(a, b - 1) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
            ranks = [
                tuple((int(row[spans[at]]), *spans[at]) for at in sorted(law.holds(rank, stages)))
                for rank in range(stages)
            ]
            into = self.transfer[:, q, q]
            self._shapes[stages, q] = _Shape(
                q,
                ranks,
                np.array([[row for row, _, _ in chunks] for chunks in ranks]),
                np.array([[into[first] if first else 0.0 for _, first, _ in c] for c in ranks]).sum(
                    axis=1
                )
                / law.copies,
                float(into[list(ends[:-1])].sum()),
            )
        return self._shapes[stages, q]

    def _least(self, shape: _Shape, table: Table, fill: float) -> float:
        """Returns a lower bound on the seconds of a step that ignores memory.

        It does not fall as `fill` grows, as no rank takes longer than all, nor waits for more than
        all transfers.
        """
        law, count = self.law, self.microbatches
        seconds = table.fastest[shape.rows, shape.q].sum(axis=1) / law.copies
        if not np.isfinite(seconds).all():
            return float("inf")
        top = (count - fill) * (seconds + law.exposed * shape.entering)
        return float(fill * (seconds.sum() + shape.borders) + top.max())

    def _of(self, shape: _Shape, table: Table, cutoff: float) -> Draft | None:
        law, count, stages = self.law, self.microbatches, len(shape.ranks)
        fill = law.fill(stages, count)
        ways: list[list[_Way]] = []
        mixed: dict[tuple[int, ...], _Mixed | None] = {}
        known: dict[tuple[tuple[int, ...], float], list[_Way]] = {}
        for rank, row in enumerate(shape.rows.tolist()):
            rows, kept = tuple(row), float(law.in_flight(stages - rank, stages, count))
            if rows not in mixed:
                mixed[rows] = self._mixed(rows, shape.q, table)
            if (rows, kept) not in known:
                all_ways, room = mixed[rows], float(self.space.memory[shape.q])
                known[rows, kept] = self._ways(all_ways, kept, room) if all_ways else []
            ways.append(known[rows, kept])
        if not all(ways):
            return None
        tops = [
            [(count - fill) * (way.seconds + law.exposed * wait) + way.once for way in options]
            for options, wait in zip(ways, shape.entering, strict=True)
        ]
        found: tuple[float, list[int]] | None = None
        for most in sorted({top for row in tops for top in row}):
            if most >= cutoff:
                break
            picks = [_fastest(w, t, most) for w, t in zip(ways, tops, strict=True)]
            if min(picks) < 0:
                continue
            seconds = sum(w[pick].seconds for w, pick in zip(ways, picks, strict=True))
            slowest = max(t[pick] for t, pick in zip(tops, picks, strict=True))
            total = fill * (seconds + shape.borders) + slowest
            if total < cutoff:
                found, cutoff = (total, picks), total
        if found is None:
            return None
        chosen = [w[pick].options for w, pick in zip(ways, found[1], strict=True)]
        return Draft(
            law,
            count,
            found[0],
            tuple(
                (shape.q, tuple((*chunk, k) for chunk, k in zip(chunks, options, strict=True)))
                for chunks, options in zip(shape.ranks, chosen, strict=True)
            ),
        )

    def _mixed(self, rows: tuple[int, ...], q: int, table: Table) -> _Mixed | None:
        """Returns all choices of options for a rank, None if one of its chunks cannot run."""
        if not table.count[list(rows), q].all():
            return None
        options = self._options(rows, q, table)
        figures = table.figures[np.array(rows), q, options]
        sums = figures[:, :, :4].sum(axis=1)
        sums[:, 0] /= self.law.copies
        order = np.lexsort((sums[:, 1], sums[:, 0]))
        return _Mixed(options[order], sums[order], figures[:, :, 4].max(axis=1)[order])

    def _options(self, rows: tuple[int, ...], q: int, table: Table) -> Ints:
        """Returns [ways, chunks] options; equal chunks are distinguished only by option counts."""
        places: dict[int, list[int]] = {}
        for at, row in enumerate(rows):
            places.setdefault(row, []).append(at)
        counts = [int(table.count[row, q]) for row in places]
        sizes = [len(of) for of in places.values()]
        many = math.prod(math.comb(c + n - 1, n) for c, n in zip(counts, sizes, strict=True))
        if many > _MOST_WAYS < math.prod(counts):
            return np.repeat(np.arange(min(counts))[:, None], len(rows), axis=1)
        found = np.zeros((1, len(rows)), dtype=np.int64)
        for (row, of), count in zip(places.items(), counts, strict=True):
            # The option that keeps the least comes first: the first chunk keeps it the longest.
            order = np.argsort(table.figures[row, q, :count, 3], kind="stable")
            some = np.repeat(order[:, None], len(of), axis=1)
            if many <= _MOST_WAYS:
                some = order[list(combinations_with_replacement(range(count), len(of)))]
            found, before = np.repeat(found, len(some), axis=0), len(found)
            found[:, of] = np.tile(some, (before, 1))
        return found

    def _ways(self, mixed: _Mixed, in_flight: float, memory: float) -> list[_Way]:
        """Returns the Pareto-optimal ways within memory, by seconds per microbatch and once."""
        nbytes = mixed.sums[:, 2] + in_flight * mixed.sums[:, 3] + mixed.transient
        fits = np.flatnonzero(nbytes <= memory)  # by seconds, and those by seconds once
        once = mixed.sums[fits, 1]
        before = np.minimum.accumulate(np.concatenate([[math.inf], once]))[:-1]
        best = fits[once < before]
        return [
            _Way(float(sums[0]), float(sums[1]), tuple(options))
            for sums, options in zip(mixed.sums[best], mixed.options[best].tolist(), strict=True)
        ]


def _fastest(ways: list[_Way], tops: list[float], most: float) -> int:
    best = -1
    for at, (way, top) in enumerate(zip(ways, tops, strict=True)):
        if top <= most and (best < 0 or way.seconds < ways[best].seconds):
            best = at
    return best

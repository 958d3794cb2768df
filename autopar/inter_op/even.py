"""Pipelines of equal sub-meshes whose ranks hold several chunks of the model.

Interleaved schedules, V shapes and bidirectional ones gain if all chunks take as long as one
another: the layers are cut into chunks of seconds as equal as whole layers allow, and what is chosen
is the number of stages and how each rank runs its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from autopar.inter_op.prices import Floats, Table
from autopar.inter_op.stage import Law
from autopar.inter_op.straight import Draft, Space

Chunks = tuple[tuple[int, int, int], ...]  # row, first, last
_MOST_WAYS = 4096  # of running the chunks of one rank; beyond, all chunks are run alike


@dataclass(frozen=True)
class _Way:
    """How one rank runs its chunks: figures of a Candidate, and the option of every chunk."""

    seconds: float
    once: float
    memory: float
    options: tuple[int, ...]


class Even:
    """All pipelines of one law with chunks and one number of microbatches.

    Args:
        space: the pipelines.
        law: of the schedule.
        microbatches: of a step.
        transfer: [layers, submesh before, submesh behind]; seconds of one microbatch's way over the
            border before each layer and back.
    """

    def __init__(self, space: Space, law: Law, microbatches: int, transfer: Floats) -> None:
        self.space, self.law, self.microbatches = space, law, microbatches
        self.transfer = transfer
        self._cuts: dict[tuple[int, int], tuple[int, ...]] = {}

    def best(self, table: Table, cutoff: float, only: int | None = None) -> Draft | None:
        """The fastest pipeline that takes less than `cutoff` seconds, None if there is none."""
        found: Draft | None = None
        for stages, q in self._shapes(only):
            limit = cutoff if found is None else found.seconds
            found = self._of(stages, q, table, limit) or found
        return found

    def _shapes(self, only: int | None) -> Iterator[tuple[int, int]]:
        """(stages, sub-mesh) that tile the devices."""
        prices = self.space.prices
        for q, size in enumerate(prices.sizes):
            stages = self.space.devices // int(size)
            exact = stages * int(size) == self.space.devices and 1 < stages
            chunks = stages * self.law.chunks // self.law.copies
            if (
                exact
                and only in (None, stages)
                and stages <= self.space.most_stages
                and chunks <= len(prices.kinds)
                and self.law.fits(stages, self.microbatches)
            ):
                yield stages, q

    def ranks(self, stages: int, q: int) -> list[Chunks]:
        """The chunks of every rank, in the order of layers."""
        count = stages * self.law.chunks // self.law.copies
        ends = self._cut(count, q)
        row = self.space.prices.row
        spans = [(a, b - 1) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        return [
            tuple(
                (int(row[spans[chunk]]), *spans[chunk])
                for chunk in sorted(self.law.holds(rank, stages))
            )
            for rank in range(stages)
        ]

    def _cut(self, count: int, q: int) -> tuple[int, ...]:
        """The ends of `count` chunks whose slowest is fastest by optimistic seconds."""
        if (count, q) not in self._cuts:
            bounds = self.space.prices.bounds(self.microbatches)
            row = self.space.prices.row
            seconds = [float(bounds[row[at, at], q, 0]) for at in range(len(row))]
            self._cuts[count, q] = balanced(seconds, count)
        return self._cuts[count, q]

    def _of(self, stages: int, q: int, table: Table, cutoff: float) -> Draft | None:
        law, count = self.law, self.microbatches
        fill = law.fill(stages, count)
        ranks = self.ranks(stages, q)
        ways: list[list[_Way]] = []
        known: dict[tuple[tuple[int, ...], float], list[_Way]] = {}
        for rank, chunks in enumerate(ranks):
            in_flight = float(law.in_flight(stages - rank, stages, count))
            key = (tuple(row for row, _, _ in chunks), in_flight)
            if key not in known:
                known[key] = self._ways(key[0], q, in_flight, table)
            ways.append(known[key])
        if not all(ways):
            return None
        waits = [law.exposed * self._entering(chunks, q) for chunks in ranks]
        tops = [
            [(count - fill) * (way.seconds + wait) + way.once for way in options]
            for options, wait in zip(ways, waits, strict=True)
        ]
        borders = sum(float(self.transfer[end, q, q]) for end in self._cut_ends(stages, q))
        found: tuple[float, list[int]] | None = None
        for most in sorted({top for row in tops for top in row}):
            if most >= cutoff:
                break
            picks = [_fastest(w, t, most) for w, t in zip(ways, tops, strict=True)]
            if min(picks) < 0:
                continue
            seconds = sum(w[pick].seconds for w, pick in zip(ways, picks, strict=True))
            slowest = max(t[pick] for t, pick in zip(tops, picks, strict=True))
            total = fill * (seconds + borders) + slowest
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
                (q, tuple((*chunk, k) for chunk, k in zip(chunks, options, strict=True)))
                for chunks, options in zip(ranks, chosen, strict=True)
            ),
        )

    def _cut_ends(self, stages: int, q: int) -> tuple[int, ...]:
        return self._cut(stages * self.law.chunks // self.law.copies, q)[:-1]

    def _entering(self, chunks: Chunks, q: int) -> float:
        """Seconds of transfers into a rank for each microbatch."""
        total = sum(float(self.transfer[first, q, q]) for _, first, _ in chunks if first)
        return total / self.law.copies

    def _ways(
        self, rows: tuple[int, ...], q: int, in_flight: float, table: Table
    ) -> list[_Way]:  # fmt: skip
        """How a rank can run its chunks within memory; equal chunks are run alike."""
        distinct = sorted(set(rows))
        counts = [int(table.count[row, q]) for row in distinct]
        if not all(counts):
            return []
        choices: Iterator[tuple[int, ...]] = product(*map(range, counts))
        if np.prod(counts) > _MOST_WAYS:
            choices = iter([(k,) * len(counts) for k in range(min(counts))])
        found = []
        for choice in choices:
            option = dict(zip(distinct, choice, strict=True))
            each = np.array([table.figures[row, q, option[row]] for row in rows])
            figures = each.sum(axis=0)
            way = _Way(
                float(figures[0]) / self.law.copies,
                float(figures[1]),
                float(figures[2] + in_flight * figures[3] + each[:, 4].max()),
                tuple(option[row] for row in rows),
            )
            if way.memory <= self.space.memory:
                found.append(way)
        return found


def _fastest(ways: list[_Way], tops: list[float], most: float) -> int:
    best = -1
    for at, (way, top) in enumerate(zip(ways, tops, strict=True)):
        if top <= most and (best < 0 or way.seconds < ways[best].seconds):
            best = at
    return best


def balanced(seconds: list[float], count: int) -> tuple[int, ...]:
    """Ends of `count` non-empty contiguous parts, the largest of whose sums is least.

    Of such cuts it is one that is even otherwise, too: parts take what is an equal share of the
    rest, within the largest sum.
    """
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    size = len(seconds)
    least = np.full((count + 1, size + 1), np.inf)
    least[0, 0] = 0.0
    for part in range(1, count + 1):
        for end in range(part, size + 1):
            starts = np.arange(part - 1, end)
            least[part, end] = np.min(np.maximum(least[part - 1, starts], sums[end] - sums[starts]))
    most = least[count, size] * (1 + 1e-9)
    ends = [size]
    for part in range(count - 1, 0, -1):
        end = ends[-1]
        fits = [
            start
            for start in range(part, end)
            if sums[end] - sums[start] <= most and least[part, start] <= most
        ]
        share = sums[end] / (part + 1)
        ends.append(min(fits, key=lambda start: abs(sums[end] - sums[start] - share)))
    return tuple(reversed(ends))

"""Pipelines of equal sub-meshes whose ranks hold several chunks of the model.

Interleaved schedules, V shapes and bidirectional ones gain if all chunks take as long as one
another: the layers are cut into chunks of seconds as equal as whole layers allow, and what is
chosen is the number of stages and how each rank runs its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from autopar.inter_op.draft import Draft, Space
from autopar.inter_op.prices import Floats, Ints, Table
from autopar.inter_op.stage import Law

Chunks = tuple[tuple[int, int, int], ...]  # row, first, last
_MOST_WAYS = 4096  # of running the chunks of one rank; beyond, all chunks are run alike


@dataclass(frozen=True)
class _Way:
    """How one rank runs its chunks: figures of a Candidate, and the option of every chunk."""

    seconds: float
    once: float
    memory: float
    options: tuple[int, ...]


@dataclass(frozen=True)
class _Shape:
    """Ranks on equal sub-meshes.

    Attributes:
        q: the sub-mesh.
        ranks: the chunks of every rank, in the order of layers.
        rows: [ranks, chunks], their signatures.
        entering: [ranks], seconds of transfers into a rank for each microbatch.
        borders: seconds of all transfers of one microbatch.
    """

    q: int
    ranks: list[Chunks]
    rows: Ints
    entering: Floats
    borders: float


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
        self._shapes: dict[tuple[int, int], _Shape] = {}

    def best(
        self, table: Table, cutoff: float, only: int | None = None, slack: float = 0.0
    ) -> Draft | None:
        """The fastest pipeline that takes less than `cutoff` seconds, None if there is none.

        There are few, so that it is the fastest whatever `slack` allows.
        """
        shapes = [self._shape(stages, q) for stages, q in self._sizes(only)]
        found: Draft | None = None
        for least, at in sorted((self._least(shape, table), at) for at, shape in enumerate(shapes)):
            limit = cutoff if found is None else found.seconds
            if least >= limit:
                break
            found = self._of(shapes[at], table, limit) or found
        return found

    rough = best

    def _sizes(self, only: int | None) -> Iterator[tuple[int, int]]:
        """(stages, sub-mesh) that tile the devices."""
        prices = self.space.prices
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
        """The chunks of every rank: as fast as one another, by optimistic seconds."""
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

    def _least(self, shape: _Shape, table: Table) -> float:
        """A bound on the seconds of a step, each rank as fast as it can be in any memory."""
        law, count = self.law, self.microbatches
        fill = law.fill(len(shape.ranks), count)
        there = np.arange(table.figures.shape[2]) < table.count[:, shape.q, None]
        fastest = np.where(there, table.figures[:, shape.q, :, 0], np.inf).min(axis=1)
        seconds = fastest[shape.rows].sum(axis=1) / law.copies
        if not np.isfinite(seconds).all():
            return float("inf")
        top = (count - fill) * (seconds + law.exposed * shape.entering)
        return float(fill * (seconds.sum() + shape.borders) + top.max())

    def _of(self, shape: _Shape, table: Table, cutoff: float) -> Draft | None:
        law, count, stages = self.law, self.microbatches, len(shape.ranks)
        fill = law.fill(stages, count)
        ways: list[list[_Way]] = []
        known: dict[tuple[tuple[int, ...], float], list[_Way]] = {}
        for rank, rows in enumerate(shape.rows.tolist()):
            key = (tuple(rows), float(law.in_flight(stages - rank, stages, count)))
            if key not in known:
                known[key] = self._ways(key[0], shape.q, key[1], table)
            ways.append(known[key])
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

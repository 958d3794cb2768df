"""Data shared by the searches for one schedule and one number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from autopar.inter_op.stage_prices import Floats, Ints, Prices
from autopar.inter_op.stage_values import Law
from autopar.inter_op.submeshes import SubMesh

# (layer after the border, sub-mesh before, sub-mesh after, microbatches) -> seconds to transfer one
# microbatch across the border, activations forward plus gradients backward
Transfer = Callable[[int, SubMesh, SubMesh, int], float]


@dataclass(frozen=True)
class Draft:
    """A pipeline as indices: per stage, its sub-mesh and (row, first, last, option) chunks."""

    law: Law
    microbatches: int
    seconds: float
    stages: tuple[tuple[int, tuple[tuple[int, int, int, int], ...]], ...]

    @property
    def cells(self) -> list[tuple[int, int]]:
        """The (row, sub-mesh) pair of every chunk."""
        return [(chunk[0], q) for q, chunks in self.stages for chunk in chunks]


@dataclass(frozen=True)
class Space:
    """The space of pipelines that a search explores.

    Attributes:
        prices: stage prices.
        devices: number of devices of the cluster.
        memory: [submeshes] bytes per device.
        most_stages: maximum number of stages.
        cuts: cache of balanced cuts, by number of chunks.
        least: cache of the seconds of the layers and the `evenness` of their cuts; they are
            proportional for all numbers of microbatches.
    """

    prices: Prices
    devices: int
    memory: Floats
    most_stages: int
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    least: list[tuple[list[float], Floats]] = field(default_factory=list, compare=False, repr=False)

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """The orders in which a pipeline can pass through the parts of the cluster."""
        return list(permutations(part_sizes(self.prices.submeshes)))

    def form(self, draft: Draft) -> Hashable:
        """Returns the schedule, microbatches, number of stages and order of the cluster's parts."""
        order = dict.fromkeys(self.prices.submeshes[q].part for q, _ in draft.stages)
        return draft.law.name, draft.microbatches, len(draft.stages), tuple(order)

    def spans(self, order: Sequence[int]) -> tuple[Ints, Ints]:
        """Returns [submeshes] where the devices of a sub-mesh's part begin and end.

        Devices are counted from the end of a pipeline that passes through the parts in `order`.
        """
        sizes = part_sizes(self.prices.submeshes)
        begins, begin = {}, 0
        for part in reversed(order):
            begins[part] = begin
            begin += sizes[part]
        first = np.array([begins[one.part] for one in self.prices.submeshes])
        return first, first + np.array([sizes[one.part] for one in self.prices.submeshes])

    def even(self, count: int, microbatches: int) -> tuple[int, ...]:
        """Returns the ends of `count` contiguous chunks, balanced by lower bounds on seconds."""
        if count not in self.cuts:
            if not self.least:
                bounds, row = self.prices.bounds(microbatches), self.prices.row
                seconds = [float(bounds[row[at, at], -1, 0]) for at in range(len(row))]
                self.least.append((seconds, evenness(seconds)))
            seconds, least = self.least[0]
            self.cuts[count] = balanced(seconds, count, least)
        return self.cuts[count]


def transfers(
    layers: int,
    submeshes: Sequence[SubMesh],
    microbatches: int,
    transfer: Transfer,
    borders: Sequence[Hashable] | None,
) -> Floats:
    """Returns [layers, submesh before, submesh after] seconds at the border before each layer."""
    found = np.zeros((layers, len(submeshes), len(submeshes)))
    like: dict[Hashable, int] = {}
    for at in range(1, layers):
        same = like.setdefault(borders[at - 1] if borders is not None else at, at)
        if same != at:
            found[at] = found[same]
            continue
        for a, before in enumerate(submeshes):
            for b, behind in enumerate(submeshes):
                found[at, a, b] = transfer(at, before, behind, microbatches)
    return found


def part_sizes(submeshes: Sequence[SubMesh]) -> dict[int, int]:
    """Returns the number of devices of every part of a cluster."""
    sizes: dict[int, int] = {}
    for one in submeshes:
        sizes[one.part] = max(one.size, sizes.get(one.part, 0))
    return sizes


def evenness(seconds: list[float]) -> Floats:
    """Returns [parts, end]: the minimal largest sum of that many contiguous parts before `end`."""
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    size = len(seconds)
    least = np.full((size + 1, size + 1), np.inf)
    least[0, 0] = 0.0
    for part in range(1, size + 1):
        for end in range(part, size + 1):
            starts = slice(part - 1, end)
            least[part, end] = np.maximum(least[part - 1, starts], sums[end] - sums[starts]).min()
    return least


def balanced(seconds: list[float], count: int, least: Floats) -> tuple[int, ...]:
    """Returns the ends of `count` non-empty contiguous parts that minimise the largest sum.

    Among such cuts it picks a balanced one: each part takes about an equal share of the rest,
    within the largest sum.

    Args:
        seconds: seconds of each element.
        count: number of parts.
        least: the `evenness` of the seconds.
    """
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    size = len(seconds)
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

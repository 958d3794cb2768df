"""What the searches for one schedule and one number of microbatches share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.inter_op.stage_prices import Floats, Prices
from autopar.inter_op.stage_values import Law


@dataclass(frozen=True)
class Draft:
    """A pipeline by numbers: for each stage its sub-mesh and (row, first, last, option) chunks."""

    law: Law
    microbatches: int
    seconds: float
    stages: tuple[tuple[int, tuple[tuple[int, int, int, int], ...]], ...]

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(row, sub-mesh) of every chunk."""
        return [(chunk[0], q) for q, chunks in self.stages for chunk in chunks]


@dataclass(frozen=True)
class Space:
    """What pipelines there are.

    Attributes:
        prices: of stages.
        devices: of the cluster.
        memory: bytes of a device.
        most_stages: how many there may be.
        cuts: the layers cut evenly into each number of chunks, as far as it was asked for.
        least: once it was asked for, seconds of the layers and how even cuts can be (`evenness`);
            they are in proportion for all numbers of microbatches.
    """

    prices: Prices
    devices: int
    memory: float
    most_stages: int
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    least: list[tuple[list[float], Floats]] = field(default_factory=list, compare=False, repr=False)

    def even(self, count: int, microbatches: int) -> tuple[int, ...]:
        """The ends of `count` contiguous chunks as fast as one another, by optimistic seconds."""
        if count not in self.cuts:
            if not self.least:
                bounds, row = self.prices.bounds(microbatches), self.prices.row
                seconds = [float(bounds[row[at, at], -1, 0]) for at in range(len(row))]
                self.least.append((seconds, evenness(seconds)))
            seconds, least = self.least[0]
            self.cuts[count] = balanced(seconds, count, least)
        return self.cuts[count]


def evenness(seconds: list[float]) -> Floats:
    """[parts, end]: the largest sum of so many contiguous parts before `end`, at the least."""
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
    """Ends of `count` non-empty contiguous parts, the largest of whose sums is least.

    Of such cuts it is one that is even otherwise, too: parts take what is an equal share of the
    rest, within the largest sum.

    Args:
        seconds: of each element.
        count: of parts.
        least: `evenness` of the seconds.
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

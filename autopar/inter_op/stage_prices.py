"""Stage costs, requested lazily; unknown ones are bounded or estimated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import CostError
from autopar.inter_op.stage_values import Candidate
from autopar.inter_op.submeshes import SubMesh

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# (first layer, last layer, both inclusive; sub-mesh; microbatches)
Cell = tuple[int, int, SubMesh, int]
StageCost = Callable[[int, int, SubMesh, int], Sequence[Candidate]]
LowerBound = Callable[[int, int, SubMesh, int], Candidate]

_SECONDS, _ONCE, _FIXED, _EACH, _TRANSIENT = range(5)
_FIGURES = 5
# Factor by which an estimate retains the excess of a known price over the best known efficiency,
# per doubling of devices, microbatches or work between the two.
_MEMORY = 0.75
# Estimates of memory are below the prices they derive from, so that near fits are requested.
_FRUGAL = 0.95
_SHARES = (0.25, 0.5, 0.75, 0.95)  # recomputed fractions of the activations
# With `scaling`, the largest assumed efficiency gain of other or more layers.
_UNLIKE = 0.8


@dataclass(frozen=True)
class Table:
    """The options of every row of ranges on every sub-mesh.

    Attributes:
        figures: [rows, submeshes, options, 5]: seconds, seconds once, fixed bytes, bytes per
            microbatch, transient bytes.
        count: [rows, submeshes] number of options.
    """

    figures: Floats
    count: Ints

    @cached_property
    def fastest(self) -> Floats:
        """The least seconds of an option, [rows, submeshes]; infinite without any."""
        there = np.arange(self.figures.shape[2]) < self.count[:, :, None]
        fastest: Floats = np.where(there, self.figures[..., _SECONDS], np.inf).min(axis=2)
        return fastest


class _Point(NamedTuple):
    """A known price that is not empty, as an origin of estimates.

    Attributes:
        microbatches, row, submesh: its key.
        front: [options, 5] figures of its candidates and of those that estimates add.
    """

    microbatches: int
    row: int
    submesh: int
    front: Floats


@dataclass
class _Nearest:
    """The most similar point of every row and sub-mesh, for one number of microbatches.

    Attributes:
        point: [rows, submeshes] its number.
        distance: [rows, submeshes] its distance.
        seen: number of points compared so far.
    """

    point: Ints
    distance: Floats
    seen: int = 0


class Prices:
    """Pareto frontiers of stage costs by signature (kinds of layers), sub-mesh and microbatches.

    With `scaling`, known prices raise the bounds. No price is assumed to be closer to its bound
    than the best known price, nor closer than a known price of the same kinds of layers with at
    most its devices, of the same kind, and microbatches and at least its layers; a price of other
    layers counts almost as much. Estimates assume that full recomputation takes `again` times the
    seconds of a range and leaves nothing in flight; partial recomputation is proportional.

    Attributes:
        row: [layers, layers] index of the signature of (first, last).
        ranges: the first range of each signature.
        known: maps (microbatches, signature, sub-mesh) to the known candidates.
    """

    def __init__(
        self,
        kinds: Sequence[Hashable],
        submeshes: Sequence[SubMesh],
        stage_cost: StageCost,
        lower_bound: LowerBound,
        scaling: bool = False,
        ahead: Callable[[Sequence[Cell]], None] | None = None,
        again: float = 0.0,
    ) -> None:
        self.kinds, self.submeshes = tuple(kinds), tuple(submeshes)
        self.known: dict[tuple[int, int, int], tuple[Candidate, ...]] = {}
        self._stage_cost, self._lower_bound, self.scaling = stage_cost, lower_bound, scaling
        self._ahead, self._again = ahead, again
        self.row, self.ranges = _signatures(self.kinds)
        families: dict[tuple[Hashable, ...], int] = {}
        self.family = np.array(
            [
                families.setdefault(
                    tuple(kind for kind, _ in groupby(self.kinds[first : last + 1])), len(families)
                )
                for first, last in self.ranges
            ]
        )
        self.lengths = np.array([last - first + 1 for first, last in self.ranges])
        self.sizes = np.array([part.size for part in submeshes])
        self.parts = np.array([part.part for part in submeshes])
        self._bounds: dict[int, Floats] = {}
        self._points: list[_Point] = []
        self._nearest: dict[int, _Nearest] = {}

    def bounds(self, microbatches: int) -> Floats:
        """Returns [rows, submeshes, 5] lower bounds of the figures."""
        if microbatches not in self._bounds:
            found = np.zeros((len(self.ranges), len(self.submeshes), _FIGURES))
            for row, (first, last) in enumerate(self.ranges):
                for q, part in enumerate(self.submeshes):
                    found[row, q] = _figures(self._lower_bound(first, last, part, microbatches))
            self._bounds[microbatches] = found
        return self._bounds[microbatches]

    def ask(self, keys: Sequence[tuple[int, int, int]]) -> None:
        """Requests the candidates of each (microbatches, signature, sub-mesh) at most once.

        Raises:
            CostError: a figure is negative or not finite.
        """
        keys = [key for key in dict.fromkeys(keys) if key not in self.known]
        if self._ahead is not None:
            self._ahead([(*self.ranges[row], self.submeshes[q], count) for count, row, q in keys])
        for microbatches, row, submesh in keys:
            first, last = self.ranges[row]
            part = self.submeshes[submesh]
            answer = tuple(self._stage_cost(first, last, part, microbatches))
            for candidate in answer:
                figures = _figures(candidate)
                if not (np.isfinite(figures).all() and (figures >= 0).all()):
                    raise CostError(
                        f"layers {first} to {last} on {part} are priced {candidate}",
                        why="seconds and bytes are finite and not negative",
                    )
            self.known[microbatches, row, submesh] = answer
            if answer:
                front = np.array([_figures(one) for one in self._frugal(answer)])
                self._points.append(_Point(microbatches, row, submesh, front))

    @property
    def families(self) -> int:
        """Number of requested combinations of sub-mesh, microbatches and set of layers."""
        return len({(b, self.family[row], q) for b, row, q in self.known})

    def table(self, microbatches: int, unknown: str) -> Table:
        """Returns all options; those not requested are bounded, estimated or omitted.

        Args:
            microbatches: per step.
            unknown: "bound", "guess" or "none".
        """
        known = {(row, q): c for (b, row, q), c in self.known.items() if b == microbatches}
        bounds = self.bounds(microbatches)
        options = max((len(answer) for answer in self.known.values()), default=1)
        figures = np.zeros((*bounds.shape[:2], max(options, 1), _FIGURES))
        count = np.zeros(bounds.shape[:2], dtype=np.int64)
        if unknown == "bound" or (unknown == "guess" and not any(self.known.values())):
            figures[:, :, 0] = bounds
            if unknown == "bound" and self.scaling:
                figures[:, :, 0, _SECONDS] *= self._ratios(microbatches)
            count[:] = 1
        elif unknown == "guess":
            figures, count = self._guesses(microbatches, figures.shape[2])
        for (row, q), answer in known.items():
            count[row, q] = len(answer)
            for k, candidate in enumerate(answer):
                figures[row, q, k] = _figures(candidate)
        return Table(figures, count)

    def _ratios(self, microbatches: int) -> Floats:
        """Returns [rows, submeshes] lower bounds on the ratio of a price to its bound."""
        found = np.ones((len(self.ranges), len(self.submeshes)))
        for (b, row, q), answer in self.known.items():
            bound = self.bounds(b)[row, q, _SECONDS]
            if answer and bound > 0:
                ratio = min(candidate.seconds for candidate in answer) / bound
                like = (self.family == self.family[row]) & (self.lengths <= self.lengths[row])
                fewer = (self.sizes >= self.sizes[q]) & (self.parts == self.parts[q])
                worse = fewer[None, :] & (b <= microbatches)
                least = np.where(like, ratio, _UNLIKE * ratio)[:, None]
                found = np.where(worse, np.maximum(found, least), found)
        return np.maximum(found, self.best_ratio())

    def best_ratio(self) -> float:
        """Returns the smallest known ratio of a price to its bound."""
        ratios = [
            min(candidate.seconds for candidate in answer) / bound
            for (b, row, q), answer in self.known.items()
            if answer and (bound := self.bounds(b)[row, q, _SECONDS]) > 0
        ]
        return max(1.0, min(ratios, default=1.0))

    def _guesses(self, microbatches: int, options: int) -> tuple[Floats, Ints]:
        """Estimates frontiers by scaling the most similar known one by the ratio of their bounds.

        Seconds are drawn towards the best known ratio of a price to its bound, more strongly the
        less similar the two are, so that promising prices are requested.
        """
        points = self._points
        options = max(options, *(len(point.front) for point in points))
        bounds, near = self.bounds(microbatches), self._compared(microbatches)
        nearest, apart = near.point, near.distance
        fronts = np.array(
            [point.front[np.minimum(np.arange(options), len(point.front) - 1)] for point in points]
        )
        origins = np.array([self.bounds(b)[row, q] for b, row, q, _ in points])
        ratios = fronts[:, :, _SECONDS].min(axis=1) / np.maximum(origins[:, _SECONDS], 1e-30)
        origin, front = origins[nearest], fronts[nearest]
        scale = bounds / np.where(origin > 0, origin, np.inf)
        length = self.lengths[:, None] / self.lengths[[row for _, row, _, _ in points]][nearest]
        fewer = self.sizes[[q for _, _, q, _ in points]][nearest] / self.sizes
        fixed = np.where(scale[:, :, _FIXED] > 0, scale[:, :, _FIXED], length * fewer)
        each = np.where(scale[:, :, _EACH] > 0, scale[:, :, _EACH], scale[:, :, _SECONDS])
        counts = np.array([b for b, _, _, _ in points])[nearest] / microbatches
        scales = np.stack(
            [scale[:, :, _SECONDS], fixed, _FRUGAL * fixed, _FRUGAL * each, fewer * counts], axis=-1
        )
        figures = front * scales[:, :, None]
        ratio, best = np.maximum(ratios[nearest], 1e-30), self.best_ratio()
        drawn = (best + (ratio - best) * _MEMORY**apart) / ratio
        figures[..., _SECONDS] *= drawn[:, :, None]
        count = np.array([len(point.front) for point in points])[nearest]
        return figures, count

    def _compared(self, microbatches: int) -> _Nearest:
        """Returns the most similar point of every row and sub-mesh, the first of equals."""
        bounds, devices = self.bounds(microbatches), self.sizes[None, :]
        if microbatches not in self._nearest:
            shape = bounds.shape[:2]
            self._nearest[microbatches] = _Nearest(
                np.zeros(shape, dtype=np.int64), np.full(shape, np.inf)
            )
        near = self._nearest[microbatches]
        work = np.log2(np.maximum(bounds[:, :, _SECONDS] * devices * microbatches, 1e-30))
        for number, (b, row, q, _) in enumerate(self._points[near.seen :], near.seen):
            there = np.log2(max(self.bounds(b)[row, q, _SECONDS] * self.sizes[q] * b, 1e-30))
            distance = (
                np.abs(np.log2(devices / self.sizes[q]))
                + 0.5 * abs(np.log2(microbatches / b))
                + 0.05 * np.abs(work - there)
                + 0.3 * (self.family[:, None] != self.family[row])
                + 0.5 * (self.parts != self.parts[q])[None, :]
            )
            closer = distance < near.distance
            near.point[closer], near.distance[closer] = number, distance[closer]
        near.seen = len(self._points)
        return near

    def _frugal(self, answer: Sequence[Candidate]) -> Sequence[Candidate]:
        """Adds options that recompute part of the activations, unless the answer has some."""
        if not self._again or any(way.recompute != "none" for way in answer):
            return answer
        one = min(answer, key=lambda way: way.seconds)
        return [
            *answer,
            *(
                replace(
                    one,
                    backward=one.backward + share * self._again * one.seconds,
                    per_microbatch=(1 - share) * one.per_microbatch,
                )
                for share in _SHARES
            ),
        ]


def _signatures(kinds: tuple[Hashable, ...]) -> tuple[Ints, list[tuple[int, int]]]:
    """Returns [layers, layers] signature indices, and the first range of each signature."""
    size = len(kinds)
    row = np.full((size, size), -1, dtype=np.int64)
    numbers: dict[tuple[int, Hashable], int] = {}
    ranges: list[tuple[int, int]] = []
    for first in range(size):
        at = -1
        for last in range(first, size):
            # A range extends a shorter one by one layer.
            at = numbers.setdefault((at, kinds[last]), len(numbers))
            if at == len(ranges):
                ranges.append((first, last))
            row[first, last] = at
    return row, ranges


def _figures(candidate: Candidate) -> Floats:
    one = candidate
    return np.array([one.seconds, one.once, one.fixed, one.per_microbatch, one.transient])

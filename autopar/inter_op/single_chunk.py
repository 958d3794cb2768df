"""Finds the best pipeline with one range of layers per stage for given prices, exactly.

Alpa (OSDI 2022, section 5.2) tries every value of the slowest stage in ascending order and stops
once it alone exceeds the best step. Here the values are bisected: the least sum over stages falls
as the slowest stage may be slower, so the sum at a threshold bounds all smaller thresholds, and the
smallest value of an interval plus that sum bounds the interval.

The activations in flight depend on the number of stages. Many such numbers share one bound first,
and the promising groups are halved until each number is solved on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.inter_op import dynamic_program as kernels
from autopar.inter_op.equal_submeshes import EqualSubmeshPipelines
from autopar.inter_op.search_task import Draft, Space
from autopar.inter_op.stage_prices import Floats, Ints, Table
from autopar.inter_op.stage_values import Law

# Factor between the first threshold and the smallest one for which the devices suffice.
_FIRST = 1.02


@dataclass(frozen=True)
class _Group:
    """Numbers of stages with the same fill and the same microbatches in flight.

    `most_fill` exceeds `fill` if the group represents several others, see `_relaxed`.
    """

    fill: float
    most_fill: float
    in_flight: Floats
    stages: tuple[int, ...]


def _relaxed(groups: list[_Group]) -> _Group:
    """Returns a group that bounds all given groups.

    It has the least fill for the sum over stages, the largest where fill shortens the slowest
    stage's share, and the fewest microbatches in flight.
    """
    kept = np.full(max(len(group.in_flight) for group in groups), np.inf)
    for group in groups:
        size = len(group.in_flight)
        kept[:size] = np.minimum(kept[:size], group.in_flight)
    return _Group(
        min(group.fill for group in groups),
        max(group.most_fill for group in groups),
        kept,
        tuple(sorted(stages for group in groups for stages in group.stages)),
    )


class SingleChunkPipelines:
    """All pipelines of one law and one number of microbatches with one range of layers per stage.

    Args:
        space: the space of pipelines.
        law: law of the schedule.
        microbatches: per step.
        transfer: [layers, submesh before, submesh after] seconds to transfer one microbatch across
            the border before each layer and back.
        order: order of the parts of the cluster, from the first stage to the last.
    """

    def __init__(
        self,
        space: Space,
        law: Law,
        microbatches: int,
        transfer: Floats,
        order: Sequence[int] = (0,),
    ) -> None:
        self.space, self.law, self.microbatches = space, law, microbatches
        self.transfer, self.spans = transfer, space.spans(order)

    def best(
        self, table: Table, cutoff: float, only: int | None = None, slack: float = 0.0
    ) -> Draft | None:
        """Returns the fastest pipeline that takes less than `cutoff` seconds, None if none does.

        Args:
            table: prices.
            cutoff: upper limit in seconds.
            only: restricts the number of stages; None for any.
            slack: relative tolerance of the result.
        """
        found = self._equal.best(table, cutoff, only)
        groups = [group for group in self._groups if only is None or only in group.stages]
        if only is not None:
            groups = [replace(group, stages=(only,)) for group in groups]
        left = [groups] if groups else []
        while left:
            some = left.pop()
            limit = cutoff if found is None else found.seconds
            draft = self._of_group(_relaxed(some), table, limit, slack)
            if draft is None:
                continue
            if len(some) == 1:
                found = draft
                continue
            halves = [some[: len(some) // 2], some[len(some) // 2 :]]
            # the more promising half comes first
            halves.sort(key=lambda half: any(len(draft.stages) in one.stages for one in half))
            left += halves
        return found

    def rough(self, table: Table, cutoff: float) -> Draft | None:
        """Returns the fastest pipeline of equal sub-meshes; cheap to compute."""
        return self._equal.best(table, cutoff)

    @cached_property
    def _equal(self) -> EqualSubmeshPipelines:
        return EqualSubmeshPipelines(self.space, self.law, self.microbatches, self.transfer)

    @cached_property
    def _groups(self) -> list[_Group]:
        law, count, most = self.law, self.microbatches, self.space.most_stages
        groups: dict[tuple[float, ...], _Group] = {}
        for stages in range(1, most + 1):
            if not law.fits(stages, count):
                continue
            fill = law.fill(stages, count)
            kept = [0.0] + [float(law.in_flight(s, stages, count)) for s in range(1, stages + 1)]
            for key, group in groups.items():
                # The in-flight numbers of fewer stages are often a prefix of those of more stages.
                if key == (fill, *kept[: len(group.in_flight)]):
                    del groups[key]
                    groups[fill, *kept] = _Group(
                        fill, fill, np.array(kept), (*group.stages, stages)
                    )
                    break
            else:
                groups[fill, *kept] = _Group(fill, fill, np.array(kept), (stages,))
        return list(groups.values())

    @cached_property
    def _rows(self) -> tuple[Ints, Ints, Floats]:
        """Splits signatures by incoming transfers; returns rows, their signatures and transfers."""
        own = np.einsum("lqq->lq", self.transfer)  # as from a stage on a sub-mesh of the same shape
        kinds, kind = np.unique(own, axis=0, return_inverse=True)
        kind = kind.reshape(-1)
        row = self.space.prices.row
        first, last = np.triu_indices(len(row))
        pairs, place = np.unique(
            row[first, last] * len(kinds) + kind[first], return_inverse=True
        )  # fmt: skip
        rows = np.full_like(row, -1)
        rows[first, last] = place.reshape(-1)
        return rows, pairs // len(kinds), kinds[pairs % len(kinds)]

    def _of_group(
        self, group: _Group, table: Table, cutoff: float, slack: float
    ) -> Draft | None:  # fmt: skip
        rows, signature, into = self._rows
        figures, count = table.figures[signature], table.count[signature]
        seconds, once = figures[..., 0], figures[..., 1]
        spare = self.microbatches - group.most_fill
        top = spare * (seconds + self.law.exposed * into[:, :, None]) + once
        program = _Program(
            rows, group.fill * seconds, top, figures[..., 2] + figures[..., 4], figures[..., 3],
            count, group.fill * self.transfer, self.space, self.spans, group.in_flight, cutoff,
        )  # fmt: skip
        answer = program.minimum(list(group.stages), cutoff, slack)
        if answer is None:
            return None
        total, stages = answer
        return Draft(
            self.law,
            self.microbatches,
            total,
            tuple(
                (int(q), ((int(signature[rows[first, last]]), int(first), int(last), int(k)),))
                for first, last, q, k in stages
            ),
        )


class _Program:
    """A dynamic program that minimises the sum of times and transfers plus the largest top.

    It omits options that reach `cutoff` on their own.
    """

    def __init__(
        self, rows: Ints, time: Floats, top: Floats, fixed: Floats, each: Floats, count: Ints,
        transfer: Floats, space: Space, spans: tuple[Ints, Ints], in_flight: Floats, cutoff: float,
    ) -> None:  # fmt: skip
        sizes, devices = space.prices.sizes, space.devices
        exists = np.arange(top.shape[2]) < count[:, :, None]
        useful = exists & (time + top < cutoff)
        top = np.where(useful, top, np.inf)
        self.lowest = kernels.lowest_tops(rows, top, count)
        usable = useful.any(axis=(0, 2))
        ends = sizes[usable], *spans
        unit = kernels.unit(np.concatenate(ends), devices) if usable.any() else 1
        self.devices = devices // unit
        # Sub-meshes and devices that are not multiples of the unit cannot be used.
        self.sizes = np.where(usable, sizes // unit, self.devices + 1)
        self.spans = tuple(span // unit for span in spans)
        self.values = np.unique(top[useful])
        self.work = kernels.least_work(rows, time, count * usable, self.sizes)
        self.in_flight, self.memory = in_flight, space.memory
        self.arrays = tuple(
            np.ascontiguousarray(array) for array in (rows, time, top, fixed, each, count, transfer)
        )

    def minimum(self, stages: list[int], cutoff: float, slack: float) -> tuple[float, Ints] | None:
        """Returns the least total below `cutoff` over the numbers of stages, with its stages.

        The result may exceed the optimum by the fraction `slack`.
        """
        values = self.values
        if not np.isfinite(self.work[-1]):
            return None
        best: tuple[float, Ints] | None = None
        tried_any = False
        intervals = [(self._smallest(), len(values) - 1, self.work[-1] / self.devices)]
        while intervals:
            low, high, least = intervals.pop()
            least_gain = kernels.ROUNDING if best is None else max(slack, kernels.ROUNDING)
            limit = cutoff * (1 - least_gain)
            high = min(high, int(np.searchsorted(values, limit - least)) - 1)
            if low > high or values[low] + least >= limit:
                continue
            at = self._next(low, high, tried_any)
            tried_any = True
            room = limit - float(values[low])
            total, found = self._at(float(values[at]), stages, room)
            intervals.append((at + 1, high, least))
            if found is None:
                continue  # the sum is too large without a slower stage, or there is no solution
            slowest = max(self.arrays[2][self.arrays[0][a, b], q, k] for a, b, q, k in found)
            if total + slowest < limit:
                best, cutoff = (total + slowest, found), total + slowest
            intervals.append((low, int(np.searchsorted(values, slowest)) - 1, total))
        return best

    def _next(self, low: int, high: int, tried_any: bool) -> int:
        """Returns the next threshold of an interval: first near its lower end, later its middle."""
        values = self.values
        if not tried_any:
            return min(high, max(low, int(np.searchsorted(values, _FIRST * values[low])) - 1))
        middle = (values[low] + values[high]) / 2
        return min(high, max(low, int(np.searchsorted(values, middle, side="right")) - 1))

    def _smallest(self) -> int:
        """Returns the first threshold for which the devices suffice, ignoring memory."""
        low, high = 0, len(self.values)
        while low < high:
            middle = (low + high) // 2
            most = float(self.values[middle])
            after, _ = kernels.devices_needed(self.lowest, self.sizes, most)
            if after[0] <= self.devices:
                high = middle
            else:
                low = middle + 1
        return low

    def _at(self, most: float, stages: list[int], room: float) -> tuple[float, Ints | None]:
        """Returns the least sum below `room` with no stage above `most`; None if there is none."""
        after, before = kernels.devices_needed(self.lowest, self.sizes, most)
        if after[0] > self.devices:
            return np.inf, None
        given: tuple[Any, ...] = (
            *self.arrays, self.sizes, *self.spans, self.devices,
            self.in_flight[: max(stages) + 1],
            self.memory, most, self.lowest, after, before,
        )  # fmt: skip
        bounds = kernels.sums_before(*given)
        if bounds[-1, self.devices - before[-1]].min() >= room:
            return np.inf, None
        totals, ends = kernels.sums(*(*given, bounds, room))
        total, number = min((float(totals[s]), s) for s in stages)
        if total >= room:
            return total, None
        return total, kernels.trace(*(*given, ends, number))

"""Simulates a step: when every action runs, how long ranks wait, and which memory they keep.

Each rank runs its complete row in order. A computation starts once the previous action has finished
and its inputs have arrived; sends and receives take no time on a rank. A transfer starts once the
sender reaches it and earlier transfers on the same link have finished; each direction between two
ranks is one link. Sums of gradients that a rank begins (SYNC_BEGIN) run one after another beside
its computation, and the rank waits where it awaits one (SYNC_AWAIT). An update that ends a step
waits for all ranks, which decide jointly whether to apply it.

This module checks the schedules independently and shares no code with them: it only reads rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.complete import complete, with_sends
from autopar.inter_op.pipeline_timeline import Span, Timeline
from autopar.inter_op.row_dependencies import dependencies, links
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.whole_rows import CODE, Columns, check_whole
from autopar.ir.action import COMPUTE, KINDS, SYNC_BEGIN, UPDATE, Action, Row
from autopar.ir.pipeline_step import Step
from autopar.loops import entry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_SEND_F, _BEGIN, _UPDATE = (CODE[kind] for kind in ("SEND_F", SYNC_BEGIN, UPDATE))
_STEADY = 3  # periods simulated after the warm-up


class StageCost(NamedTuple):
    """The cost of one stage per microbatch.

    Attributes:
        forward: seconds.
        input: seconds of the backward for the gradient of the stage's input.
        weight: seconds of the backward for the gradients of its parameters; a whole backward takes
            `input + weight`.
        activation: bytes kept from the forward until the end of the backward.
        kept: bytes kept between the input and the weight backward, part of `activation` or instead
            of it; None for all of `activation`.
        update: seconds of one update of the stage, including gradient synchronisation that it waits
            for.
        sums: seconds of gradient synchronisation that overlaps with computation.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    activation: float = 1.0
    kept: float | None = None
    update: float = 0.0
    sums: float = 0.0


def simulate(
    step: Schedule | Step,
    costs: Sequence[StageCost],
    transfers: Sequence[float] = (),
    returns: Sequence[float] | None = None,
) -> Timeline:
    """Simulates a step and returns its timeline; see `prepare` and `Prepared.run`.

    Raises:
        ScheduleError: the schedule is incomplete, or the number of costs is not that of the stages.
        DeadlockError: actions of the schedule wait for one another.
    """
    return prepare(step).run(costs, transfers, returns)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A checked step with its actions in a topological order.

    Arrays have one entry per action, ordered by rank.
    """

    step: Step
    flat: list[Action]
    begins: Ints  # start of each rank's row, plus the end of the last row
    kind: Ints
    stage: Ints
    hop: Ints  # the earlier of the two neighbouring stages that a send connects, or -1
    link: Ints  # link of a send, or -1
    needs: Ints  # dependencies of all actions, concatenated
    first: Ints  # start of each action's dependencies in `needs`, plus the end of the last
    order: Ints  # topological order of the actions

    @cached_property
    def in_order(self) -> list[Action]:
        """Returns the actions in topological order."""
        return [self.flat[at] for at in self.order.tolist()]

    def run(
        self,
        costs: Sequence[StageCost],
        transfers: Sequence[float] = (),
        returns: Sequence[float] | None = None,
    ) -> Timeline:
        """Simulates the step under the given costs.

        Args:
            costs: one per stage, in order.
            transfers: seconds from each stage to the next; empty for none. Stages on the same rank
                transfer nothing. A value that skips stages is sent with the data that its reader
                receives from the previous stage, and takes no extra time.
            returns: seconds of the gradients in the opposite direction, in the same order; None for
                the same as `transfers`.

        Raises:
            ScheduleError: the number of costs is wrong, or a figure is negative or not a number.
        """
        table, duration, travel = self.seconds_of(costs, transfers, returns)
        end, leaving, arrival = _run(
            self.order, self.begins, self.needs, self.first, self.link, duration, travel
        )
        released = np.zeros((len(KINDS), self.step.stages))
        released[: len(COMPUTE)] = -table[3], table[3], table[3] - table[4], table[4]
        kept = -released[self.kind, self.stage]
        counted = np.zeros(len(KINDS), np.int64)
        counted[: len(COMPUTE)] = 1, -1, 0, -1
        shown = self.kind < len(COMPUTE)
        if table[5].any():
            shown |= self.kind == _UPDATE
        rows = [slice(*pair) for pair in zip(self.begins[:-1], self.begins[1:], strict=True)]
        picked = [np.flatnonzero(shown[row]).tolist() for row in rows]
        return Timeline(
            tuple(
                tuple(map(self.flat[row].__getitem__, own))
                for row, own in zip(rows, picked, strict=True)
            ),
            tuple((end[row] - duration[row])[shown[row]] for row in rows),
            tuple(end[row][shown[row]] for row in rows),
            tuple(int(np.cumsum(counted[self.kind[row]]).max(initial=0)) for row in rows),
            tuple(float(np.cumsum(kept[row]).max(initial=0)) for row in rows),
            lambda: self._transfers(leaving, arrival),
        )

    def seconds_of(
        self,
        costs: Sequence[StageCost],
        transfers: Sequence[float] = (),
        returns: Sequence[float] | None = None,
    ) -> tuple[Floats, Floats, Floats]:
        """Returns the costs by field and stage, and the seconds of every action.

        The latter are those in which an action occupies its rank, and those of its transfer.
        Arguments and errors are those of `run`.
        """
        back = transfers if returns is None else returns
        table, hops = _figures(self.step.stages, costs, transfers, back)
        seconds = np.zeros((len(KINDS), self.step.stages))
        seconds[: len(COMPUTE)] = table[0], table[1] + table[2], table[1], table[2]
        seconds[_UPDATE] = table[5]
        way = np.where(self.kind == _SEND_F, 0, 1)
        travel = np.where(self.hop >= 0, hops[way, np.maximum(self.hop, 0)], 0.0)
        travel = np.where(self.kind == _BEGIN, table[6][self.stage], travel)
        return table, seconds[self.kind, self.stage], travel

    def _transfers(self, leaving: Floats, arrival: Floats) -> tuple[Span, ...]:
        """Returns the transfers that take time, with their sending ranks."""
        rank = np.searchsorted(self.begins, np.arange(len(self.flat)), side="right") - 1
        travels = (self.link >= 0) & (arrival > leaving)
        return tuple(
            Span(int(rank[at]), self.flat[at], float(leaving[at]), float(arrival[at]))
            for at in np.flatnonzero(travels).tolist()
        )


def _figures(
    stages: int, costs: Sequence[StageCost], transfers: Sequence[float], back: Sequence[float]
) -> tuple[Floats, Floats]:
    """Converts the costs to arrays and validates them."""
    if len(costs) != stages or any(len(hops) not in (0, stages - 1) for hops in (transfers, back)):
        raise ScheduleError(
            f"{len(costs)} costs and {len(transfers)} transfers for {stages} stages",
            why="each stage has its costs, each pair of neighbours its transfer",
            todo=f"give {stages} costs and {stages - 1} transfers, or no transfers",
        )
    full = [
        (*cost[:4], cost.activation if cost.kept is None else cost.kept, cost.update, cost.sums)
        for cost in costs
    ]
    table = np.array(full, np.float64).T
    still = [0.0] * max(stages - 1, 1)
    hops = np.array([list(seconds) or still for seconds in (transfers, back)], np.float64)
    figures = np.concatenate((table.ravel(), hops.ravel()))
    if not (np.isfinite(figures).all() and (figures >= 0).all()):
        raise ScheduleError(
            "the cost of a stage or a transfer is negative or not a number",
            why=f"costs {list(costs)}, transfers {list(transfers)} and {list(back)}",
            todo="give seconds and bytes from 0",
        )
    return table, hops


def prepare(step: Schedule | Step) -> Prepared:
    """Checks a step and prepares it for simulation under many costs.

    Args:
        step: a schedule, whose rows are completed for a chain of stages, or complete rows. An
            asynchronous schedule runs for a few periods, from the first microbatch to the last.

    Raises:
        ScheduleError: an action is missing, duplicate, unknown or on a rank that does not hold its
            stage.
        DeadlockError: actions wait for one another; the message names the cycle.
    """
    if isinstance(step, Schedule):
        step = _completed(step)
    else:
        _check(step.rows, step)
    columns = Columns.of(step.rows, step.placement, step.microbatches)
    hop, link = links(columns, step)
    needs, first = dependencies(columns, step)
    order, heads = _order(columns.begins, needs, first)
    if len(order) < len(columns.flat):
        raise _deadlock(columns, needs, first, heads)
    begins, kind, stage = columns.begins, columns.kind, columns.stage
    return Prepared(step, columns.flat, begins, kind, stage, hop, link, needs, first, order)


def _completed(schedule: Schedule) -> Step:
    """Returns the rows of a schedule with its transfers after checking that it is whole."""
    if schedule.flushes:
        _check(schedule.rows, schedule)
        return with_sends(schedule)
    step = complete(schedule).unrolled(schedule.warm_up + _STEADY)
    _check(step.rows, step)
    return step


def _check(rows: Sequence[Row], sized: Schedule | Step) -> None:
    """Checks rows with `check_whole`."""
    if isinstance(sized, Step):
        rows = [[action for action in row if action.kind in COMPUTE] for row in rows]  # type: ignore[misc]
    check_whole(Columns.of(rows, sized.placement, sized.microbatches), sized.placement)


@entry
def _order(begins: Ints, needs: Ints, first: Ints) -> tuple[Ints, Ints]:
    """Returns a topological order of the runnable actions, and where each rank stops."""
    ranks = len(begins) - 1
    heads = begins[:-1].copy()
    done = np.zeros(len(first) - 1, np.bool_)
    order = np.empty(len(first) - 1, np.int64)
    count = 0
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while heads[rank] < begins[rank + 1]:
                at = heads[rank]
                ready = True
                for place in range(first[at], first[at + 1]):
                    ready = ready and done[needs[place]]
                if not ready:
                    break
                done[at] = True
                order[count] = at
                count += 1
                heads[rank] += 1
                moved = True
    return order[:count], heads


@entry
def _run(
    order: Ints,
    begins: Ints,
    needs: Ints,
    first: Ints,
    link: Ints,
    duration: Floats,
    travel: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Returns the end of each action, and the departure and arrival of its transfer."""
    ranks = len(begins) - 1
    heads = np.zeros(len(order), np.bool_)
    for rank in range(ranks):
        if begins[rank] < begins[rank + 1]:
            heads[begins[rank]] = True
    end, leaving, arrival = np.empty(len(order)), np.empty(len(order)), np.empty(len(order))
    free = np.zeros(ranks * ranks)
    for at in order:
        start = 0.0 if heads[at] else end[at - 1]
        for place in range(first[at], first[at + 1]):
            start = max(start, arrival[needs[place]])
        end[at] = start + duration[at]
        leaving[at] = arrival[at] = end[at]
        if link[at] >= 0:
            leaving[at] = max(end[at], free[link[at]])
            free[link[at]] = arrival[at] = leaving[at] + travel[at]
    return end, leaving, arrival


def _deadlock(columns: Columns, needs: Ints, first: Ints, heads: Ints) -> DeadlockError:
    """Follows the dependencies of a blocked rank until they form a cycle, and reports it."""
    flat, begins, rank = columns.flat, columns.begins, columns.rank
    at = next(int(head) for head, last in zip(heads, begins[1:], strict=True) if head < last)
    seen: list[int] = []
    missing: dict[int, int] = {}
    while at not in seen:
        seen.append(at)
        waiting = needs[first[at] : first[at + 1]].tolist()
        missing[at] = next(need for need in waiting if need >= heads[rank[need]])
        at = int(heads[rank[missing[at]]])
    circle = seen[seen.index(at) :]
    parts = []
    for head, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        need = missing[head]
        behind = "" if need == following else f", which comes after {flat[following]}"
        parts.append(f"{flat[head]} waits for {flat[need]} on rank {rank[need]}{behind}")
    return DeadlockError(
        "the schedule cannot end: " + ", ".join(str(flat[head]) for head in circle) + " wait for"
        " one another"
        if len(circle) > 1
        else f"the schedule cannot end: {flat[at]} waits for what comes after it",
        where="ranks " + ", ".join(str(int(rank[head])) for head in circle),
        why="; ".join(parts),
        todo="move one of these actions behind what it waits for",
    )

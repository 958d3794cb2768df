"""What a step takes: when every action runs, what ranks wait for, and what they keep.

A rank runs its complete row in order. What computes begins when the action before it has ended and
what it needs has arrived; sends and receives take no time of a rank. A transfer begins when the
sender has come to it, and follows those before it on the same link, one for each direction between
two ranks. An update that ends a step waits for all ranks, which decide together whether it is made.

This module judges the schedules and shares no code with them: it reads rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.complete import complete
from autopar.inter_op.pipeline_timeline import Span, Timeline
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.whole_rows import CODE, B, Columns, F, I, W, check_whole
from autopar.ir.action import ALL, COMPUTE, KINDS, UPDATE, Action, Row
from autopar.ir.pipeline_step import Step

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_SEND_F, _SEND_B, _UPDATE = (CODE[kind] for kind in ("SEND_F", "SEND_B", UPDATE))
_STEADY = 3  # periods that are played behind the warm-up
_MORE = 4  # further ones, by which the steady state is measured
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    return cast(_Function, numba.njit(cache=True, nogil=True)(function))


class StageCost(NamedTuple):
    """What one stage takes for one microbatch.

    Attributes:
        forward: seconds.
        input: seconds of the backward that gives the gradient of the stage's input.
        weight: seconds of the backward that gives the gradients of its parameters; a whole backward
            takes `input + weight`.
        activation: bytes kept from the forward until the backward has ended.
        kept: bytes of `activation`, or in its place, that stay between the input backward and the
            weight backward; all of `activation` where None.
        update: seconds of what one update of the stage takes, its gradients' synchronisation
            included.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    activation: float = 1.0
    kept: float | None = None
    update: float = 0.0


def simulate(
    step: Schedule | Step,
    costs: Sequence[StageCost],
    transfers: Sequence[float] = (),
    returns: Sequence[float] | None = None,
) -> Timeline:
    """Returns when each action of a step runs; see `prepare` and `Prepared.run`.

    Raises:
        ScheduleError: the schedule is not whole, or there are not as many costs as stages.
        DeadlockError: actions of the schedule wait for one another.
    """
    return prepare(step).run(costs, transfers, returns)


def steady(
    schedule: Schedule,
    step: Step,
    costs: Sequence[StageCost],
    transfers: Sequence[float] = (),
    returns: Sequence[float] | None = None,
) -> tuple[float, float]:
    """Returns seconds of a period in the steady state, and the part of them that ranks are idle.

    Args:
        schedule: that does not flush.
        step: its complete rows, of one period.
        costs, transfers, returns: as of `Prepared.run`.

    Raises:
        ScheduleError, DeadlockError: as `simulate`.
    """
    few = schedule.warm_up + _STEADY
    before, after = (
        simulate(step.unrolled(periods), costs, transfers, returns)
        for periods in (few, few + _MORE)
    )
    seconds = (after.seconds - before.seconds) / _MORE
    busy = (sum(after.busy) - sum(before.busy)) / _MORE / len(step.rows)
    return seconds, 1 - busy / seconds if seconds else 0.0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step that has been checked and put in an order in which everything can run.

    Arrays hold one entry for each action, rank after rank.
    """

    step: Step
    flat: list[Action]
    begins: Ints  # where each rank's row begins, and the end of the last one
    kind: Ints
    stage: Ints
    hop: Ints  # between which neighbours a send goes, by the number of the earlier one, or -1
    link: Ints  # on which a send goes, or -1
    needs: Ints  # what has to be done, or to arrive, before an action, one action after the other
    first: Ints  # where in `needs` those of each action begin, and the end of the last one
    order: Ints  # in which an action comes after all that it needs

    @cached_property
    def in_order(self) -> list[Action]:
        """The actions, each after all that it needs."""
        return [self.flat[at] for at in self.order.tolist()]

    def run(
        self,
        costs: Sequence[StageCost],
        transfers: Sequence[float] = (),
        returns: Sequence[float] | None = None,
    ) -> Timeline:
        """Returns when each action runs.

        Args:
            costs: of the stages, in their order.
            transfers: seconds from each stage to the next; none where empty. Between stages on one
                rank nothing is transferred. What skips stages comes with what its reader is sent
                by the stage before it, and takes no seconds of its own.
            returns: seconds of the gradient on its way back, in the same order; as `transfers`
                where None.

        Raises:
            ScheduleError: there are not as many costs as stages, or a figure is no number from 0.
        """
        back = transfers if returns is None else returns
        table, hops = _figures(self.step.stages, costs, transfers, back)
        seconds = np.zeros((len(KINDS), self.step.stages))
        seconds[: len(COMPUTE)] = table[0], table[1] + table[2], table[1], table[2]
        seconds[_UPDATE] = table[5]
        duration = seconds[self.kind, self.stage]
        way = np.where(self.kind == _SEND_F, 0, 1)
        travel = np.where(self.hop >= 0, hops[way, np.maximum(self.hop, 0)], 0.0)
        end, leaving, arrival = _run(
            self.order, self.begins, self.needs, self.first, self.link, duration, travel
        )
        released = np.zeros_like(seconds)
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

    def _transfers(self, leaving: Floats, arrival: Floats) -> tuple[Span, ...]:
        """What takes its time on a link, by the rank that sends it."""
        rank = np.searchsorted(self.begins, np.arange(len(self.flat)), side="right") - 1
        travels = (self.link >= 0) & (arrival > leaving)
        return tuple(
            Span(int(rank[at]), self.flat[at], float(leaving[at]), float(arrival[at]))
            for at in np.flatnonzero(travels).tolist()
        )


def _figures(
    stages: int, costs: Sequence[StageCost], transfers: Sequence[float], back: Sequence[float]
) -> tuple[Floats, Floats]:
    """Forward, input, weight, activation, kept, update of each stage; seconds of hops both ways."""
    if len(costs) != stages or any(len(hops) not in (0, stages - 1) for hops in (transfers, back)):
        raise ScheduleError(
            f"{len(costs)} costs and {len(transfers)} transfers for {stages} stages",
            why="each stage has its costs, each pair of neighbours its transfer",
            todo=f"give {stages} costs and {stages - 1} transfers, or no transfers",
        )
    full = [
        (*cost[:4], cost.activation if cost.kept is None else cost.kept, cost.update)
        for cost in costs
    ]
    table = np.array(full, np.float64).T
    still = [0.0] * max(stages - 1, 1)
    hops = np.array([list(seconds) or still for seconds in (transfers, back)], np.float64)
    figures = np.concatenate((table.ravel(), hops.ravel()))
    if not (np.isfinite(figures).all() and (figures >= 0).all()):
        raise ScheduleError(
            "a stage or a transfer costs less than nothing, or no number",
            why=f"costs {list(costs)}, transfers {list(transfers)} and {list(back)}",
            todo="give seconds and bytes from 0",
        )
    return table, hops


def prepare(step: Schedule | Step) -> Prepared:
    """Returns a step ready to run under many costs.

    Args:
        step: a schedule, whose rows are completed for stages in a chain, or complete rows. Of a
            schedule that does not flush a few periods are run, from the first microbatch to the
            last.

    Raises:
        ScheduleError: an action is missing, double, unknown or on a rank that does not hold its
            stage.
        DeadlockError: actions wait for one another; names the circle.
    """
    if isinstance(step, Schedule):
        step = _completed(step)
    else:
        _check(step.rows, step)
    columns = Columns.of(step.rows, step.placement, step.microbatches)
    hop, link = _links(columns, step)
    needs, first = _needs(columns, step)
    order, heads = _order(columns.begins, needs, first)
    if len(order) < len(columns.flat):
        raise _deadlock(columns, needs, first, heads)
    begins, kind, stage = columns.begins, columns.kind, columns.stage
    return Prepared(step, columns.flat, begins, kind, stage, hop, link, needs, first, order)


def _completed(schedule: Schedule) -> Step:
    """The complete rows of a schedule that is whole."""
    if schedule.flushes:
        _check(schedule.rows, schedule)
        return complete(schedule)
    step = complete(schedule).unrolled(schedule.warm_up + _STEADY)
    _check(step.rows, step)
    return step


def _check(rows: Sequence[Row], sized: Schedule | Step) -> None:
    """As `check_whole`."""
    if isinstance(sized, Step):
        rows = [[action for action in row if action.kind in COMPUTE] for row in rows]  # type: ignore[misc]
    check_whole(Columns.of(rows, sized.placement, sized.microbatches), sized.placement)


def _links(columns: Columns, step: Step) -> tuple[Ints, Ints]:
    """The hop and the link of each send; -1 of other actions."""
    hop, link = (np.full(len(columns.flat), -1) for _ in range(2))
    placed = np.array(step.placement)
    for kind, way in ((_SEND_F, 1), (_SEND_B, -1)):
        at = np.flatnonzero(columns.kind == kind)
        others = np.array([columns.flat[n].partner for n in at.tolist()], np.int64)
        peer = placed[columns.copy[at], others]
        link[at] = columns.rank[at] * len(step.rows) + peer
        near = others == columns.stage[at] + way
        hop[at[near]] = np.minimum(columns.stage[at], others)[near]
    return hop, link


def _needs(columns: Columns, step: Step) -> tuple[Ints, Ints]:
    """What has to be done, or to arrive, before each action: numbers, and where they begin."""
    done = [columns.where(kind) for kind in (F, B, I, W)]
    backward = np.maximum(done[B], done[I])
    pairs = [(backward, done[F]), (done[W], done[I])]
    partner = np.array([action.partner if action.kind[0] == "S" else -1 for action in columns.flat])
    for maker, reader, gradient in step.wiring.edges:
        for kind, made, one, other in (
            (_SEND_F, done[F], maker, reader),
            (_SEND_B, backward, reader, maker),
        )[: 1 + gradient]:
            sent = columns.where(kind, partner == other)[:, one]
            own = [ranks[one] == ranks[other] for ranks in step.placement]
            brought = np.where(np.array(own)[:, None], made[:, one], sent)
            pairs.append(((done[F] if kind == _SEND_F else backward)[:, other], brought))
    pairs += _ends(columns)
    at, need = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    there = (at >= 0) & (need >= 0)
    at, need = at[there], need[there]
    count = np.bincount(at, minlength=len(columns.flat))
    return need[np.argsort(at, kind="stable")], np.concatenate(([0], np.cumsum(count)))


def _ends(columns: Columns) -> list[tuple[Ints, Ints]]:
    """The first update of all stages on each rank, and what comes before those of all ranks."""
    ends = (columns.kind == _UPDATE) & (columns.batch == ALL)
    if not ends.any():
        return []
    first = np.array([np.flatnonzero(ends & (columns.rank == r))[0] for r in set(columns.rank)])
    before = first[first > columns.begins[columns.rank[first]]] - 1
    return [(np.repeat(first, len(before)), np.tile(before, len(first)))]


@_compiled
def _order(begins: Ints, needs: Ints, first: Ints) -> tuple[Ints, Ints]:
    """All that can run, in an order in which it can, and where each rank then stands."""
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


@_compiled
def _run(
    order: Ints,
    begins: Ints,
    needs: Ints,
    first: Ints,
    link: Ints,
    duration: Floats,
    travel: Floats,
) -> tuple[Floats, Floats, Floats]:
    """When each action ends, when what it sends begins to travel, and when that arrives."""
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
    """Follows, from a rank that stands still, what waits for what until it comes round."""
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

"""What a schedule takes: when every action runs, what ranks wait for, and what they keep.

A rank runs its row in order; an action begins when the one before it has ended and what it needs
has arrived. A transfer begins when the sender has computed what it sends, takes no time of either
rank, and follows those before it on the same link, one for each direction between two ranks.

This module judges the schedules and shares no code with them: it reads rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule import Schedule
from autopar.ir.action import COMPUTE, Action

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_CODE = {kind: code for code, kind in enumerate(COMPUTE)}
_F, _B, _I, _W = range(4)
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
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    activation: float = 1.0
    kept: float | None = None


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    transfers: Sequence[float] = (),
    returns: Sequence[float] | None = None,
) -> Timeline:
    """Returns when each action of a schedule runs; see `Prepared.run`.

    Raises:
        ScheduleError: the schedule is not whole, or there are not as many costs as stages.
        DeadlockError: actions of the schedule wait for one another.
    """
    return prepare(schedule).run(costs, transfers, returns)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A schedule that has been checked and put in an order in which everything can run.

    Arrays hold one entry for each action, rank after rank.
    """

    schedule: Schedule
    begins: Ints  # where each rank's row begins, and the end of the last one
    kind: Ints
    stage: Ints
    source: Ints  # the action on another stage whose result is needed, or -1
    link: Ints  # on which the result of an action travels, or -1
    order: Ints  # in which an action comes after all that it needs

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
                rank nothing is transferred.
            returns: seconds of the gradient on its way back, in the same order; as `transfers`
                where None.

        Raises:
            ScheduleError: there are not as many costs as stages, or a figure is no number from 0.
        """
        back = transfers if returns is None else returns
        table, hops = _figures(self.schedule.stages, costs, transfers, back)
        seconds = np.stack((table[0], table[1] + table[2], table[1], table[2]))
        duration = seconds[self.kind, self.stage]
        forward = self.kind == _F
        hop = np.clip(np.where(forward, self.stage, self.stage - 1), 0, hops.shape[1] - 1)
        travel = np.where(self.link >= 0, np.where(forward, hops[0][hop], hops[1][hop]), 0.0)
        end = _run(self.order, self.begins, self.source, self.link, duration, travel)
        released = np.stack((-table[3], table[3], table[3] - table[4], table[4]))
        kept = -released[self.kind, self.stage]
        counted = np.array((1, -1, 0, -1))[self.kind]
        rows = [slice(*pair) for pair in zip(self.begins[:-1], self.begins[1:], strict=True)]
        return Timeline(
            tuple(self.schedule.rows),
            tuple(end[row] - duration[row] for row in rows),
            tuple(end[row] for row in rows),
            tuple(int(np.cumsum(counted[row]).max(initial=0)) for row in rows),
            tuple(float(np.cumsum(kept[row]).max(initial=0)) for row in rows),
        )


def _figures(
    stages: int, costs: Sequence[StageCost], transfers: Sequence[float], back: Sequence[float]
) -> tuple[Floats, Floats]:
    """Forward, input, weight, activation and kept of each stage; seconds of hops both ways."""
    if len(costs) != stages or any(len(hops) not in (0, stages - 1) for hops in (transfers, back)):
        raise ScheduleError(
            f"{len(costs)} costs and {len(transfers)} transfers for {stages} stages",
            why="each stage has its costs, each pair of neighbours its transfer",
            todo=f"give {stages} costs and {stages - 1} transfers, or no transfers",
        )
    full = [(*cost[:4], cost.activation if cost.kept is None else cost.kept) for cost in costs]
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


def prepare(schedule: Schedule) -> Prepared:
    """Returns a schedule ready to run under many costs.

    Raises:
        ScheduleError: an action is missing, double, unknown or on a rank that does not hold its
            stage.
        DeadlockError: actions wait for one another; names the circle.
    """
    flat = [action for row in schedule.rows for action in row]
    begins = np.cumsum([0, *map(len, schedule.rows)])
    rank = np.repeat(np.arange(schedule.ranks), np.diff(begins))
    kind, stage, batch, copy = _columns(schedule, flat)
    where = _where(schedule, flat, rank, kind, stage, batch, copy)
    at = np.arange(len(flat))
    backward = np.maximum(where[_B], where[_I])
    source = np.full(len(flat), -1)
    forward = (kind == _F) & (stage > 0)
    source[forward] = where[_F][copy, stage - 1, batch][forward]
    inner = ((kind == _B) | (kind == _I)) & (stage < schedule.stages - 1)
    following = np.minimum(stage + 1, schedule.stages - 1)
    source[inner] = backward[copy, following, batch][inner]
    own = np.where(kind == _W, where[_I][copy, stage, batch], where[_F][copy, stage, batch])
    own[kind == _F] = -1
    link = np.full(len(flat), -1)
    needing = at[source >= 0]
    sender, reader = rank[source[needing]], rank[needing]
    crossing = sender != reader
    link[source[needing[crossing]]] = (sender * schedule.ranks + reader)[crossing]
    order, heads = _order(begins, source, own)
    if len(order) < len(flat):
        raise _deadlock(flat, begins, rank, source, own, heads)
    return Prepared(schedule, begins, kind, stage, source, link, order)


def _columns(schedule: Schedule, flat: list[Action]) -> tuple[Ints, Ints, Ints, Ints]:
    """Kind, stage, microbatch and copy of each action."""
    sizes = (schedule.stages, schedule.microbatches, schedule.copies)
    kind = np.array([_CODE.get(action[0], -1) for action in flat], np.int64)
    columns = (map(itemgetter(field), flat) for field in (1, 2, 3))
    stage, batch, copy = numbers = [np.array(list(column), np.int64) for column in columns]
    strange = kind < 0
    for column, size in zip(numbers, sizes, strict=True):
        strange |= (column < 0) | (column >= size)
    for at in np.flatnonzero(strange):
        raise ScheduleError(
            f"{flat[at]} is no action that computes a part of the step",
            why=f"there are {sizes[0]} stages, {sizes[1]} microbatches and {sizes[2]} copies",
            todo="simulate a schedule before it is lowered: rows of F, B, I and W",
        )
    return kind, stage, batch, copy


def _where(
    schedule: Schedule,
    flat: list[Action],
    rank: Ints,
    kind: Ints,
    stage: Ints,
    batch: Ints,
    copy: Ints,
) -> Ints:
    """Where each action is, by kind, copy, stage and microbatch; -1 where it is not."""
    shape = (len(COMPUTE), schedule.copies, schedule.stages, schedule.microbatches)
    where = np.full(shape, -1)
    where[kind, copy, stage, batch] = np.arange(len(flat))
    kept = where[kind, copy, stage, batch]
    double = np.flatnonzero(kept != np.arange(len(flat)))
    if len(double):
        action = flat[double[0]]
        raise ScheduleError(f"{action} is in the schedule twice", todo="leave one of them out")
    elsewhere = np.flatnonzero(np.array(schedule.placement)[copy, stage] != rank)
    if len(elsewhere):
        action = flat[elsewhere[0]]
        raise ScheduleError(
            f"{action} is on rank {rank[elsewhere[0]]}",
            why=f"the placement has its stage on rank {schedule.rank_of(action)}",
            todo="move the action or the stage",
        )
    there = where >= 0
    taken = there[_F].any(axis=1)  # by copy and microbatch
    halves = there[_I].astype(int) + there[_W]
    whole = there[_F] & np.where(there[_B], halves == 0, halves == 2)
    wrong = np.argwhere((whole != taken[:, None, :]) | (taken.sum(axis=0) != 1))
    if len(wrong):
        number, at, microbatch = map(int, wrong[0])
        raise ScheduleError(
            f"stage {at} does not train on microbatch {microbatch} once",
            where=f"copy {number} of the model",
            why="one copy runs, on every stage, F and then B, or F, I and W",
            todo="add the actions that are missing, leave out those that are double",
        )
    return where


@_compiled
def _order(begins: Ints, source: Ints, own: Ints) -> tuple[Ints, Ints]:
    """All that can run, in an order in which it can, and where each rank then stands."""
    ranks = len(begins) - 1
    heads = begins[:-1].copy()
    done = np.zeros(len(source), np.bool_)
    order = np.empty(len(source), np.int64)
    count = 0
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while heads[rank] < begins[rank + 1]:
                at = heads[rank]
                if source[at] >= 0 and not done[source[at]]:
                    break
                if own[at] >= 0 and not done[own[at]]:
                    break
                done[at] = True
                order[count] = at
                count += 1
                heads[rank] += 1
                moved = True
    return order[:count], heads


@_compiled
def _run(
    order: Ints, begins: Ints, source: Ints, link: Ints, duration: Floats, travel: Floats
) -> Floats:
    """The second at which each action ends."""
    ranks = len(begins) - 1
    first = np.zeros(len(order), np.bool_)
    for rank in range(ranks):
        if begins[rank] < begins[rank + 1]:
            first[begins[rank]] = True
    end, arrival = np.empty(len(order)), np.empty(len(order))
    free = np.zeros(ranks * ranks)
    for at in order:
        start = 0.0 if first[at] else end[at - 1]
        if source[at] >= 0:
            start = max(start, arrival[source[at]])
        end[at] = start + duration[at]
        arrival[at] = end[at]
        if link[at] >= 0:
            arrival[at] = max(end[at], free[link[at]]) + travel[at]
            free[link[at]] = arrival[at]
    return end


def _deadlock(
    flat: list[Action], begins: Ints, rank: Ints, source: Ints, own: Ints, heads: Ints
) -> DeadlockError:
    """Follows, from a rank that stands still, what waits for what until it comes round."""
    at = next(int(head) for head, last in zip(heads, begins[1:], strict=True) if head < last)
    seen: list[int] = []
    needs: dict[int, int] = {}
    while at not in seen:
        seen.append(at)
        waiting = [int(need[at]) for need in (own, source) if need[at] >= 0]
        needs[at] = next(need for need in waiting if need >= heads[rank[need]])
        at = int(heads[rank[needs[at]]])
    circle = seen[seen.index(at) :]
    parts = []
    for head, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        need = needs[head]
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

"""The steady state of an asynchronous schedule: seconds of a period, and idle time.

The rows of a period repeat, and so do their dependencies on results of the same period or of
earlier periods. After a transient, which may be long, such a system runs with a period of

    max over cycles of  (seconds on the cycle) / (periods that it spans)

(Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, section 3.7). A rank is
such a cycle and spans one period; so is a link. A round trip between ranks, or a sum of gradients
that is awaited periods later, may span several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.schedule_time import Prepared, StageCost, prepare
from autopar.ir.pipeline_step import Step, draining
from autopar.loops import entry, inner

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_EXACT = 1e-13  # part of all seconds of a period that counts as none


def steady(
    step: Step,
    costs: Sequence[StageCost],
    transfers: Sequence[float] = (),
    returns: Sequence[float] | None = None,
) -> tuple[float, float]:
    """Returns the seconds of a steady-state period and the idle fraction of the ranks.

    Args:
        step: the complete rows of one period of an asynchronous schedule.
        costs, transfers, returns: as in `Prepared.run`.

    Raises:
        ScheduleError, DeadlockError: as `simulate`.
    """
    prepared = prepare(step.unrolled(draining(step.rows, step.microbatches) + 1))
    _, duration, travel = prepared.seconds_of(costs, transfers, returns)
    rank, place, own, needs = _period(step, prepared)
    occupied = duration[own]
    busy = np.bincount(rank, occupied, len(step.rows))
    edges = _edges(rank, prepared.link[own], place, needs, occupied, travel[own])
    exact = _EXACT * float(occupied.sum() + travel[own].sum())
    seconds = float(longest_cycle(*edges, float(busy.max()), exact))
    return seconds, 1 - float(busy.mean()) / seconds if seconds else 0.0


def _period(step: Step, prepared: Prepared) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns the actions of a period in which none is missing, by their places in the rows.

    Args:
        step: one period.
        prepared: as many as it takes until such a period, which is the last with a new microbatch.

    Returns:
        Of each action its rank, its position in the topological order of the period, and its
        position in `prepared`; and [waiting action, its need, periods in between], one row each.
    """
    count = prepared.step.microbatches // step.microbatches
    batches = [np.array([a.microbatch for a in row], np.int64) for row in step.rows]
    begins = np.cumsum([0, *map(len, batches)])
    places, periods = [], []
    for begin, batch in zip(begins, batches, strict=False):
        for number in range(2 * count - 1):
            moved = batch + number * step.microbatches
            runs = np.flatnonzero((moved >= 0) & (moved < prepared.step.microbatches))
            places.append(begin + runs)
            periods.append(np.full(len(runs), number))
    place, period = np.concatenate(places), np.concatenate(periods)
    last = prepared.order[period[prepared.order] == count - 1]
    own, order = np.empty_like(last), np.empty_like(last)
    own[place[last]] = last
    order[place[last]] = np.arange(len(last))
    degree = prepared.first[own + 1] - prepared.first[own]
    waiting = np.repeat(np.arange(len(own)), degree)
    offset = np.arange(len(waiting)) - np.repeat(np.cumsum(degree) - degree, degree)
    need = prepared.needs[prepared.first[own][waiting] + offset]
    needs = np.stack((waiting, place[need], count - 1 - period[need]))
    return np.repeat(np.arange(len(batches)), np.diff(begins)), order, own, needs


def _edges(
    rank: Ints, link: Ints, number: Ints, needs: Ints, duration: Floats, travel: Floats
) -> tuple[Ints, Ints, Floats, Ints]:
    """Returns the dependencies of the ends of actions, and of the arrivals of their messages.

    An action with number n in topological order has the node 2 n, and its transfer 2 n + 1.

    Returns:
        Start of each node's edges; their sources, seconds and periods in between.
    """
    end, arrival = 2 * number, 2 * number + 1
    before, wraps = _before(rank)
    sends = np.flatnonzero(link >= 0)
    prior, again = _before(link[sends])
    target, source, seconds, periods = (
        np.concatenate(parts)
        for parts in zip(
            (end, end[before], duration, wraps),
            (end[needs[0]], arrival[needs[1]], duration[needs[0]], needs[2]),
            (arrival, end, travel, np.zeros_like(end)),
            (arrival[sends], arrival[sends[prior]], travel[sends], again),
            strict=True,
        )
    )
    order = np.argsort(target, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=2 * len(number)))))
    return first, source[order], seconds[order], periods[order]


def _before(groups: Ints) -> tuple[Ints, Ints]:
    """Returns the element before each in its group, in a circle, and 1 where the circle closes."""
    order = np.argsort(groups, kind="stable")
    heads = np.flatnonzero(np.diff(groups[order], prepend=-1))
    prior = np.roll(order, 1)
    prior[heads] = order[np.append(heads[1:], len(order))[: len(heads)] - 1]
    before, wraps = np.empty_like(order), np.zeros_like(order)
    before[order] = prior
    wraps[order[heads]] = 1
    return before, wraps


@entry
def longest_cycle(
    first: Ints, source: Ints, weight: Floats, distance: Ints, least: float, exact: float
) -> float:
    """Returns the largest ratio of weight to distance of a cycle in a graph, at least `least`.

    Longest paths exist if no cycle has a larger ratio than the one by which distance is charged.
    Otherwise the edges by which paths grow come to close such a cycle, and its ratio is next.

    Args:
        first: start of each node's incoming edges, plus the end of the last.
        source, weight, distance: of the edges; no cycle has the distance 0. Fewer passes are
            needed if edges of distance 0 come from nodes of lower numbers.
        least: the ratio of a cycle.
        exact: a weight that counts as none.
    """
    ratio = least
    while True:
        reach, via = np.zeros(len(first) - 1), np.full(len(first) - 1, -1)
        moved, better = True, ratio
        while moved and better <= ratio:
            moved = False
            for node in range(len(reach)):
                for edge in range(first[node], first[node + 1]):
                    total = reach[source[edge]] + weight[edge] - ratio * distance[edge]
                    if total > reach[node] + exact:
                        reach[node], via[node], moved = total, edge, True
            better = max(ratio, _best(via, source, weight, distance))
        if better <= ratio:
            return ratio
        ratio = better


@inner
def _best(via: Ints, source: Ints, weight: Floats, distance: Ints) -> float:
    """Returns the largest ratio of a cycle in which each node has one incoming edge, 0 for none."""
    best, seen = 0.0, np.full(len(via), -1)
    for begin in range(len(via)):
        node = begin
        while seen[node] < 0 and via[node] >= 0:
            seen[node] = begin
            node = source[via[node]]
        if seen[node] == begin:  # the walk from `begin` has come back to a node of its own
            sums, periods, end = weight[via[node]], distance[via[node]], node
            node = source[via[node]]
            while node != end:
                sums += weight[via[node]]
                periods += distance[via[node]]
                node = source[via[node]]
            best = max(best, sums / periods)
    return best

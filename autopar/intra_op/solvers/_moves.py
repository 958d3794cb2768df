"""Compiled local moves: changes of single nodes, and kicks that repair forbidden neighbours.

The objective is seconds, with `Local.big` for everything forbidden, plus a weight for every byte
above the limit at every time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.intra_op.reduce.flat import Flat, Floats, Ints, offsets
from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.solvers._trws import Links, links, near

FITTING = 1e30  # seconds per byte, more than any choice is worth


class Local(NamedTuple):
    """A problem for local moves: its graph, and per node its pieces of memory."""

    graph: Links
    cost: Floats
    first: Ints
    low: Ints
    high: Ints
    begin: Ints
    nbytes: Floats
    base: Floats
    limit: float
    big: float


def local(flat: Flat) -> Local:
    """Returns a problem's arrays for local moves."""
    order = np.argsort(flat.span[:, 0], kind="stable")
    counts = np.bincount(flat.span[:, 0], minlength=flat.nodes).astype(np.int64)
    finite = flat.matrix[flat.matrix < np.inf]
    big = 10 * (1.0 + float(np.abs(flat.cost).max(initial=0.0)) + float(np.abs(finite).sum()))
    columns = flat.span[order].T
    return Local(
        links(flat),
        flat.cost,
        offsets(counts),
        np.ascontiguousarray(columns[1]),
        np.ascontiguousarray(columns[2]),
        flat.held[:-1][order],
        flat.nbytes,
        flat.base,
        flat.limit,
        big,
    )


@inner
def change(s: Local, choice: Ints, v: int, r: int) -> float:
    """Returns the rise in cost, in seconds, if node v chooses r."""
    g, old = s.graph, choice[v]
    rise = s.cost[g.start[v] + r] - s.cost[g.start[v] + old]
    for k in range(g.first[v], g.first[v + 1]):
        w, at, step, far_step, _ = near(g, g.halves[k])
        line = at + choice[w] * far_step
        rise += min(g.matrix[line + r * step], s.big) - min(g.matrix[line + old * step], s.big)
    return float(rise)


@inner
def shift(s: Local, held: Floats, v: int, old: int, new: int) -> float:
    """Moves a node's memory to another choice; returns the rise in bytes over the limit."""
    rise = 0.0
    for p in range(s.first[v], s.first[v + 1]):
        more = s.nbytes[s.begin[p] + new] - s.nbytes[s.begin[p] + old]
        if more != 0:
            for t in range(s.low[p], s.high[p]):
                above = max(held[t] - s.limit, 0.0)
                held[t] += more
                rise += max(held[t] - s.limit, 0.0) - above
    return rise


@entry
def holds(s: Local, choice: Ints, held: Floats) -> float:
    """Writes the bytes at each time; returns the sum of bytes over the limit."""
    above = 0.0
    change = np.zeros(len(held) + 1)
    for v in range(len(choice)):
        for p in range(s.first[v], s.first[v + 1]):
            amount = s.nbytes[s.begin[p] + choice[v]]
            change[s.low[p]] += amount
            change[s.high[p]] -= amount
    now = 0.0
    for t in range(len(held)):
        now += change[t]
        held[t] = now + s.base[t]
        above += max(held[t] - s.limit, 0.0)
    return above


@entry
def descend(s: Local, choice: Ints, held: Floats, weight: float, sweeps: int) -> float:
    """Changes nodes one at a time until no change helps; returns the rise of the objective."""
    total = 0.0
    for _ in range(sweeps):
        changed = False
        for v in range(len(choice)):
            for r in range(s.graph.start[v + 1] - s.graph.start[v]):
                old = choice[v]
                if r == old:
                    continue
                rise = change(s, choice, v, r)
                # A more expensive choice only pays where memory is short.
                if rise >= 0 and not _crowded(s, held, v):
                    continue
                above = shift(s, held, v, old, r)
                if rise + weight * above < -1e-9 * abs(rise):
                    choice[v] = r
                    total += rise + weight * above
                    changed = True
                else:
                    shift(s, held, v, r, old)
        if not changed:
            break
    return total


@inner
def _crowded(s: Local, held: Floats, v: int) -> bool:
    for p in range(s.first[v], s.first[v + 1]):
        for t in range(s.low[p], s.high[p]):
            if held[t] > s.limit:
                return True
    return False


@inner
def _kick(s: Local, choice: Ints, held: Floats, v: int, r: int, locked: Ints, mark: int) -> None:
    """Sets a node, then changes neighbours that it forbids, and their neighbours in turn."""
    shift(s, held, v, choice[v], r)
    choice[v] = r
    locked[v] = mark
    pending, count, at = np.empty(len(choice), np.int64), 1, 0
    pending[0] = v
    g = s.graph
    while at < count:
        u = pending[at]
        at += 1
        for k in range(g.first[u], g.first[u + 1]):
            w, place, step, far_step, other = near(g, g.halves[k])
            if locked[w] == mark:
                continue
            if g.matrix[place + choice[u] * step + choice[w] * far_step] < np.inf:
                continue
            best, found = np.inf, choice[w]
            for i in range(other):
                rise = change(s, choice, w, i)
                if g.matrix[place + choice[u] * step + i * far_step] < np.inf and rise < best:
                    best, found = rise, i
            if best < np.inf:
                shift(s, held, w, choice[w], found)
                choice[w] = found
            locked[w] = mark
            pending[count] = w
            count += 1


@inner
def paid(s: Local, choice: Ints) -> float:
    """Returns the cost of a choice."""
    g, total = s.graph, 0.0
    for v in range(len(choice)):
        total += s.cost[g.start[v] + choice[v]]
    for e in range(len(g.ends)):
        v, w = g.ends[e, 0], g.ends[e, 1]
        row = g.place[e] + choice[v] * (g.start[w + 1] - g.start[w])
        total += min(g.matrix[row + choice[w]], s.big)
    return total


@entry
def price(s: Local, choice: Ints) -> float:
    """Returns the cost of a choice, to Python."""
    return paid(s, choice)


@inner
def above(s: Local, held: Floats) -> float:
    """Returns the sum of bytes over the limit."""
    total = 0.0
    for t in range(len(held)):
        total += max(held[t] - s.limit, 0.0)
    return total


@inner
def better(now: float, over: float, before: float, over_before: float) -> bool:
    """Returns whether a choice is nearer to fitting, or fits as well and is cheaper."""
    return over < over_before or (over == over_before and now < before - 1e-12 * abs(before))


class Walk(NamedTuple):
    """State of a walk over choices, and the best choice met."""

    choice: Ints
    held: Floats
    best: Ints
    best_held: Floats
    record: Floats  # the best choice's cost and bytes over the limit


@inner
def walk(s: Local, choice: Ints, held: Floats) -> Walk:
    """Returns a walk that starts at a choice."""
    record = np.array([paid(s, choice), above(s, held)])
    return Walk(choice.copy(), held.copy(), choice.copy(), held.copy(), record)


@inner
def judged(s: Local, choice: Ints, held: Floats, met: Walk, deviation: float) -> None:
    """Accepts a choice that costs little more than the best one, else steps back to the last.

    Keeps the best choice. "Little" is a share `deviation` of its cost; with 0 nothing gets worse:
    Dueck, "New Optimization Heuristics: The Great Deluge Algorithm and the Record-to-Record
    Travel", J. Comput. Phys. 104 (1993).
    """
    now, over = paid(s, choice), above(s, held)
    if better(now, over, met.record[0], met.record[1]):
        met.record[0], met.record[1] = now, over
        met.best[:] = choice
        met.best_held[:] = held
    if over <= met.record[1] and now <= met.record[0] + deviation * abs(met.record[0]):
        met.choice[:] = choice
        met.held[:] = held
    else:
        choice[:] = met.choice
        held[:] = met.held


@entry
def kicks(s: Local, choice: Ints, held: Floats, rounds: int, deviation: float, seed: int) -> None:
    """Kicks random nodes, repairs, and descends, repeatedly; leaves the best choice met."""
    np.random.seed(seed)
    n, met = len(choice), walk(s, choice, held)
    locked = np.zeros(n, np.int64)
    for mark in range(1, rounds + 1):
        v = np.random.randint(n)
        size = s.graph.start[v + 1] - s.graph.start[v]
        if size == 1:
            continue
        _kick(s, choice, held, v, np.random.randint(size), locked, mark)
        descend(s, choice, held, FITTING, 3)
        judged(s, choice, held, met, deviation)
    choice[:] = met.best
    held[:] = met.best_held

"""Compiled moves of several nodes (kicks) under simulated annealing, within memory.

A kick forces a random node to a random choice and solves a random forest of the nodes around it
again (`forest`), with memory at a price. It is undone if memory exceeds the limit, as a segment
tree shows (`usage_tree`), or by the rule of Metropolis et al. (J. Chem. Phys. 21, 1953), at a
temperature that falls: Kirkpatrick et al., "Optimization by Simulated Annealing" (Science 220,
1983).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.intra_op.reduce.flat import Floats, Ints
from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.solvers._large.forest import Forest, resolve
from autopar.intra_op.solvers._large.usage_tree import Usage, swap
from autopar.intra_op.solvers._moves import Local, change, paid
from autopar.intra_op.solvers._trws import near

SMALLEST, DOUBLINGS = 4, 5  # nodes of a ball: 4, 8, ... 64


class Walk(NamedTuple):
    """State of a walk over choices that fit.

    Args:
        space: working space.
        usage: bytes of `choice`.
        cost: cost of every choice, with its memory priced.
        choice: where the walk is.
        best: the cheapest choice met, without a price of memory.
    """

    space: Forest
    usage: Usage
    cost: Floats
    choice: Ints
    best: Ints


@inner
def _ball(s: Local, f: Forest, root: int, most: int) -> int:
    """Writes up to `most` nodes around a root into `f.nodes`, breadth first; returns the number."""
    g, count, at = s.graph, 1, 0
    f.nodes[0], f.place[root] = root, 0
    while at < count < most:
        v = f.nodes[at]
        degree = g.first[v + 1] - g.first[v]
        turn = np.random.randint(max(degree, 1))
        for k in range(degree):
            w = near(g, g.halves[g.first[v] + (k + turn) % degree])[0]
            if f.place[w] < 0:
                f.nodes[count], f.place[w] = w, 0
                count += 1
                if count == most:
                    break
        at += 1
    for k in range(count):
        f.place[f.nodes[k]] = -1
    for k in range(count - 1, 1, -1):  # the root stays first
        other = np.random.randint(1, k + 1)
        f.nodes[k], f.nodes[other] = f.nodes[other], f.nodes[k]
    return count


@inner
def _take(s: Local, w: Walk, count: int) -> None:
    """Exchanges the forest's new choices and the present ones."""
    f = w.space
    for k in range(count):
        v = f.nodes[k]
        old = w.choice[v]
        if f.taken[k] != old:
            swap(s, w.usage, v, old, f.taken[k])
            w.choice[v], f.taken[k] = f.taken[k], old


@entry
def anneal(s: Local, w: Walk, record: float, rounds: int, heat: float, seed: int) -> float:
    """Kicks random nodes `rounds` times at a temperature of `heat` seconds.

    Returns the seconds of the cheapest choice, at most `record`, the initial seconds of `w.best`.
    """
    np.random.seed(seed)
    choice, cost = w.choice, w.cost
    n, now = len(choice), paid(s, choice)
    for _ in range(rounds):
        root = np.random.randint(n)
        asked = np.random.randint(s.graph.start[root + 1] - s.graph.start[root])
        asked = -1 if asked == choice[root] else asked
        candidates = _ball(s, w.space, root, SMALLEST << np.random.randint(DOUBLINGS))
        count, rise = resolve(s, w.space, cost, choice, candidates, asked)
        if rise > -heat * np.log(np.random.random()):
            continue
        rise += _unpriced(s, w, count)
        _take(s, w, count)
        if w.usage.top[1] > s.limit:
            _take(s, w, count)
            continue
        now += rise
        if now < record - 1e-12 * abs(record):
            record = now
            w.best[:] = choice
    return record


@inner
def _unpriced(s: Local, w: Walk, count: int) -> float:
    """Returns the difference between the rise of the cost and the rise of the priced cost."""
    total = 0.0
    for k in range(count):
        at = s.graph.start[w.space.nodes[k]]
        new, old = at + w.space.taken[k], at + w.choice[w.space.nodes[k]]
        total += (s.cost[new] - w.cost[new]) - (s.cost[old] - w.cost[old])
    return total


@entry
def polish(s: Local, u: Usage, choice: Ints, sweeps: int) -> None:
    """Changes single nodes within memory until no change is cheaper."""
    for _ in range(sweeps):
        changed = False
        for v in range(len(choice)):
            for r in range(s.graph.start[v + 1] - s.graph.start[v]):
                old = choice[v]
                rise = change(s, choice, v, r) if r != old else 0.0
                if rise < -1e-12 * abs(s.cost[s.graph.start[v] + old]):
                    swap(s, u, v, old, r)
                    if u.top[1] <= s.limit:
                        choice[v] = r
                        changed = True
                    else:
                        swap(s, u, v, r, old)
        if not changed:
            break


@entry
def repair(s: Local, u: Usage, cost: Floats, choice: Ints) -> bool:
    """Reduces memory at the fullest time until the limit holds; returns whether it succeeded.

    Among all choices with fewer bytes at that time and no more at any other, it takes the one with
    the least rise of the priced cost per byte.
    """
    while u.top[1] > s.limit:
        at = 1
        while at < len(u.top) >> 1:
            at = 2 * at + (u.top[2 * at + 1] > u.top[2 * at])
        time, over = at - (len(u.top) >> 1), u.top[1] - s.limit
        least, node, taken = np.inf, -1, 0
        for v in range(len(choice)):
            for r in range(s.graph.start[v + 1] - s.graph.start[v]):
                relief = _relief(s, v, choice[v], r, time)
                if relief > 0:
                    k = s.graph.start[v]
                    rise = change(s, choice, v, r) - s.cost[k + r] + s.cost[k + choice[v]]
                    rise += cost[k + r] - cost[k + choice[v]]
                    rise /= min(relief, over)
                    if rise < least:
                        least, node, taken = rise, v, r
        if node < 0:
            return False
        swap(s, u, node, choice[node], taken)
        choice[node] = taken
    return True


@inner
def _relief(s: Local, v: int, old: int, new: int, time: int) -> float:
    """Returns how many bytes less node v holds at a time; -1 if it holds more at any."""
    relief = 0.0
    for p in range(s.first[v], s.first[v + 1]):
        less = s.nbytes[s.begin[p] + old] - s.nbytes[s.begin[p] + new]
        if less < 0:
            return -1.0
        if s.low[p] <= time < s.high[p]:
            relief += less
    return relief

"""The compiled reduction that compares the choices of a node."""

from __future__ import annotations

import numpy as np

from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.reduce.store import (
    AFTER,
    DEGREE,
    FIRST,
    HELD,
    NEXT,
    NONE,
    PIECES,
    PLACE,
    SIZE,
    STALE,
    START,
    Floats,
    Ints,
    Store,
    far,
    restrict,
    strides,
)


@inner
def lighter(s: Store, v: int, r: int, i: int) -> bool:
    """Returns whether choice r holds no more bytes than choice i at any binding time."""
    p = s.node[v, PIECES]
    while p != NONE:
        if s.pool[s.piece[p, HELD] + r] > s.pool[s.piece[p, HELD] + i]:
            return False
        p = s.piece[p, NEXT]
    return True


@inner
def least_gain(s: Store, h: int, i: int, r: int, floor: float) -> float:
    """Returns the least excess of choice i's row over choice r's, among the pairs that i allows.

    Minus infinity if that is below `floor`.
    """
    near, step = strides(s, h)
    at = s.edge[h >> 1, PLACE]
    one, two = at + i * near, at + r * near
    least = np.inf
    for _ in range(s.node[far(s, h), SIZE]):
        if s.pool[one] < np.inf:
            least = min(least, s.pool[one] - s.pool[two])
            if least < floor:
                return -np.inf
        one += step
        two += step
    return least


@inner
def cheapest_partners(s: Store, h: int, count: int, best: Ints, at_best: int) -> None:
    """Writes the cheapest choice at the far end of h for each of `count` choices."""
    near, step = strides(s, h)
    at, other = s.edge[h >> 1, PLACE], s.node[far(s, h), SIZE]
    for i in range(count):
        found = 0
        for j in range(1, other):
            if s.pool[at + i * near + j * step] < s.pool[at + i * near + found * step]:
                found = j
        best[at_best + i] = found


@inner
def gains_at_best(s: Store, v: int, i: int, best: Ints, gains: Floats) -> None:
    """Writes how much more node v costs with each other choice than with i, with i's best partners.

    With any other partners, the gains are at most as large.
    """
    start, count = s.node[v, START], s.node[v, SIZE]
    for r in range(count):
        gains[r] = s.pool[start + i] - s.pool[start + r]
    k, h = 0, s.node[v, FIRST]
    while h != NONE:
        near, step = strides(s, h)
        at = s.edge[h >> 1, PLACE] + best[k * count + i] * step
        own = s.pool[at + i * near]
        for r in range(count):
            gains[r] += own - s.pool[at + r * near]
        k += 1
        h = s.half[h, AFTER]


@inner
def dominates(s: Store, v: int, r: int, i: int, most: float, best: Ints) -> bool:
    """Returns whether choice r of node v costs no more than i, whatever its neighbours choose.

    `most` is the gain of `gains_at_best`.
    """
    start, count = s.node[v, START], s.node[v, SIZE]
    excess, k, h = s.pool[start + i] - s.pool[start + r], 0, s.node[v, FIRST]
    while h != NONE:
        near, step = strides(s, h)
        at = s.edge[h >> 1, PLACE] + best[k * count + i] * step
        here = s.pool[at + i * near] - s.pool[at + r * near]
        gain = least_gain(s, h, i, r, here - most)
        excess += gain
        most += gain - here
        if excess == -np.inf:
            return False
        k += 1
        h = s.half[h, AFTER]
    return bool(excess >= 0)


@inner
def dominate(s: Store, v: int) -> bool:
    """Drops choices for which another is never worse and never holds more memory.

    Swapping in the other choice keeps a solution valid and raises no cost, whatever the neighbours
    choose. Returns False if no choice is left.
    """
    count = s.node[v, SIZE]
    keep, best = np.empty(count, np.bool_), np.empty(s.node[v, DEGREE] * count, np.int64)
    gains = np.empty(count)
    k, h = 0, s.node[v, FIRST]
    while h != NONE:
        cheapest_partners(s, h, count, best, k * count)
        k += 1
        h = s.half[h, AFTER]
    for i in range(count):
        keep[i] = True
    for i in range(count):
        gains_at_best(s, v, i, best, gains)
        for r in range(count):
            better = gains[r] >= 0 and r != i and keep[r] and lighter(s, v, r, i)
            if better and dominates(s, v, r, i, gains[r], best):
                keep[i] = False
                break
    return restrict(s, v, keep)


@entry
def dominate_stale(s: Store) -> bool:
    """Drops dominated choices where something changed. Returns False if no choice is left."""
    for v in range(len(s.node)):
        if s.node[v, SIZE] and s.node[v, STALE]:
            s.node[v, STALE] = 0
            if not dominate(s, v):
                return False
    return True

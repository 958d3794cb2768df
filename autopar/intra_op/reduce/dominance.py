"""Reductions that compare the choices of a node, and those that look at memory."""

from __future__ import annotations

import numpy as np

from autopar.intra_op.reduce.compiled import entry, inner
from autopar.intra_op.reduce.store import (
    AFTER,
    DEGREE,
    FIRST,
    HELD,
    NEXT,
    NONE,
    OWNER,
    PIECES,
    PLACE,
    SIZE,
    STALE,
    START,
    Store,
    far,
    restrict,
    strides,
    touch,
    touch_edge,
)


@inner
def lighter(s: Store, v: int, r: int, i: int) -> bool:
    """Whether choice r holds no more bytes than choice i at any binding time."""
    p = s.node[v, PIECES]
    while p != NONE:
        if s.pool[s.piece[p, HELD] + r] > s.pool[s.piece[p, HELD] + i]:
            return False
        p = s.piece[p, NEXT]
    return True


@inner
def least_gain(s: Store, h: int, i: int, r: int) -> float:
    """The least by which choice i's row exceeds choice r's, over what i allows."""
    near, step = strides(s, h)
    at = s.edge[h >> 1, PLACE]
    one, two = at + i * near, at + r * near
    least = np.inf
    for _ in range(s.node[far(s, h), SIZE]):
        if s.pool[one] < np.inf:
            least = min(least, s.pool[one] - s.pool[two])
        one += step
        two += step
    return least


@inner
def forbid_pairs(s: Store, h: int, i: int, r: int, rest: float, slack: float) -> None:
    """Forbids choice i beside those neighbours' choices beside which r is no worse."""
    near, step = strides(s, h)
    at = s.edge[h >> 1, PLACE]
    one, two = at + i * near, at + r * near
    changed = False
    for _ in range(s.node[far(s, h), SIZE]):
        if s.pool[one] < np.inf and rest + s.pool[one] - s.pool[two] >= slack:
            s.pool[one] = np.inf
            changed = True
        one += step
        two += step
    if changed:
        touch_edge(s, h >> 1)
        touch(s, far(s, h))
        touch(s, s.half[h, OWNER])


@inner
def dominate(s: Store, v: int, pairs: bool) -> bool:
    """Drops choices that are never better than another one that holds no more memory, whatever the
    neighbours choose (dead-end elimination); and forbids pairs of which the same is true given the
    neighbour's choice. Swapping in the other choice lowers (cost, index) of any solution, so that
    the first of the optimal solutions is kept.
    """
    count, degree = s.node[v, SIZE], s.node[v, DEGREE]
    keep = np.empty(count, np.bool_)
    for i in range(count):
        keep[i] = True
    halves, least = np.empty(degree, np.int64), np.empty(degree)
    h = s.node[v, FIRST]
    for k in range(degree):
        halves[k] = h
        h = s.half[h, AFTER]
    start = s.node[v, START]
    for i in range(count):
        for r in range(count):
            if r == i or not keep[r] or not lighter(s, v, r, i):
                continue
            excess, blocked = s.pool[start + i] - s.pool[start + r], 0
            for k in range(degree):
                least[k] = least_gain(s, halves[k], i, r)
                if least[k] > -np.inf:
                    excess += least[k]
                else:
                    blocked += 1
                    if blocked > 1 or not pairs:
                        break
            # Ties go to the first, beyond doubt.
            slack = (
                0.0
                if r < i
                else 1e-13 * (abs(s.pool[start + i]) + abs(s.pool[start + r]) + abs(excess))
                + 1e-300
            )
            if blocked == 0 and excess >= slack:
                keep[i] = False
                break
            if pairs and blocked <= 1:
                for k in range(degree):
                    if blocked == 0:
                        forbid_pairs(s, halves[k], i, r, excess - least[k], slack)
                    elif least[k] == -np.inf:
                        forbid_pairs(s, halves[k], i, r, excess, slack)
    return restrict(s, v, keep)


@entry
def dominate_stale(s: Store, pairs: bool) -> bool:
    """Looks for dominated choices where something changed. Returns False if no choice is left."""
    for v in range(len(s.node)):
        if s.node[v, SIZE] and s.node[v, STALE]:
            s.node[v, STALE] = 0
            if not dominate(s, v, pairs):
                return False
    return True

"""Compiled reductions that use memory."""

from __future__ import annotations

import numpy as np

from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.reduce.store import (
    HELD,
    HIGH,
    LOW,
    NEXT,
    NONE,
    PIECES,
    SIZE,
    Flags,
    Floats,
    Ints,
    Store,
    hold,
    restrict,
    touch,
)


@inner
def profile(s: Store, most: bool) -> Floats:
    """Returns the bytes at each time if every node holds its least, or its most."""
    times = len(s.base) - 1
    held = np.zeros(times + 1)
    for v in range(len(s.node)):
        p = s.node[v, PIECES] if s.node[v, SIZE] else NONE
        while p != NONE:
            amount = extreme(s, v, p, most)
            held[s.piece[p, LOW]] += amount
            held[s.piece[p, HIGH]] -= amount
            p = s.piece[p, NEXT]
    for t in range(1, times):
        held[t] += held[t - 1]
    for t in range(times):
        held[t] += s.base[t]
    return held


@inner
def extreme(s: Store, v: int, p: int, most: bool) -> float:
    """Returns the least bytes of a piece, or the most."""
    at = s.piece[p, HELD]
    found = s.pool[at]
    for i in range(at + 1, at + s.node[v, SIZE]):
        if (s.pool[i] > found) == most:
            found = s.pool[i]
    return float(found)


@entry
def update_memory(s: Store, limit: float) -> float:
    """Drops choices that cannot fit, and narrows memory to the times at which it can bind.

    A choice cannot fit if it does not even when all other nodes take their least memory. Memory
    cannot bind at a time if it fits even when all nodes take their most. Constant pieces move into
    the base.

    Returns the least peak if it exceeds the limit, infinity if no choice of some node fits, else 0.
    """
    slack = 1e-12 * limit
    least, most = profile(s, False), profile(s, True)
    times, peak = len(least) - 1, 0.0
    following = np.empty(times + 1, np.int64)  # the first binding time from here on
    following[times] = times
    for t in range(times):
        s.binds[t + 1] = s.binds[t] + (most[t] > limit)
        peak = max(peak, least[t])
    if peak > limit + slack:
        return peak
    for t in range(times - 1, -1, -1):
        following[t] = t if most[t] > limit else following[t + 1]
    for v in range(len(s.node)):
        if s.node[v, SIZE] and s.node[v, PIECES] != NONE:
            if not restrict(s, v, fitting(s, v, limit + slack, least)):
                return np.inf
            trim(s, v, following)
    return 0.0


@inner
def fitting(s: Store, v: int, limit: float, least: Floats) -> Flags:
    """Returns which choices of a node fit if all others take their least memory."""
    keep = np.empty(s.node[v, SIZE], np.bool_)
    for i in range(len(keep)):
        keep[i] = True
    p = s.node[v, PIECES]
    while p != NONE:
        at, lowest = s.piece[p, HELD], extreme(s, v, p, False)
        if extreme(s, v, p, True) > lowest:
            top = 0.0
            for t in range(s.piece[p, LOW], s.piece[p, HIGH]):
                top = max(top, least[t])
            for i in range(len(keep)):
                keep[i] = keep[i] and s.pool[at + i] - lowest <= limit - top
        p = s.piece[p, NEXT]
    return keep


@inner
def trim(s: Store, v: int, following: Ints) -> None:
    """Narrows the pieces of a node to binding times; constant pieces move into the base."""
    p, before, after = s.node[v, PIECES], 0, 0
    s.node[v, PIECES] = NONE
    while p != NONE:
        rest, low, high = s.piece[p, NEXT], s.piece[p, LOW], s.piece[p, HIGH]
        before += 1
        if s.binds[high] != s.binds[low]:
            s.piece[p, LOW] = following[low]
            while s.binds[high - 1] == s.binds[high]:
                high -= 1
            s.piece[p, HIGH] = high
            hold(s, v, p)
        p = rest
    p = s.node[v, PIECES]
    while p != NONE:
        after += 1
        p = s.piece[p, NEXT]
    if after != before:
        touch(s, v)

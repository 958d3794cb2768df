"""The problem while it is reduced: pools, linked lists, and the operations that rules use.

Everything is flat arrays in one tuple, so that compiled functions can share it; few arrays, since
each adds compile time to every call. `pool` holds costs (a node's at START), matrices (an edge's at
PLACE, row-major; rows are choices of its first end) and bytes (a piece's at HELD). `log` holds the
original index of each choice (also at START) and then the eliminations. An edge has two half-edges,
2 e at its first end and 2 e + 1 at its second, in a doubly linked list per node. A node's memory is
a linked list of pieces: bytes of each choice, held at the times LOW .. HIGH.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.intra_op.reduce.numba_compile import inner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NONE = -1
# Columns of `Store.node`; QUEUE and RECORD are lists that share its rows.
SIZE, START, FIRST, DEGREE, PIECES, WAITING, STALE, QUEUE, RECORD = range(9)
# Columns of `Store.half`, `Store.edge` and `Store.piece`.
OWNER, AFTER, BEFORE = range(3)
PLACE, ROOM, CHANGED, LINE = range(4)
LOW, HIGH, HELD, LOT, NEXT = range(5)
# Entries of `Store.used`.
POOL, LOG, RECORDS, NODE_IN, NODE_OUT, EDGE_IN, EDGE_OUT = range(7)


class Store(NamedTuple):
    """Arrays of a problem under reduction; see the module."""

    node: NDArray[np.int64]
    half: NDArray[np.int64]
    edge: NDArray[np.int64]
    piece: NDArray[np.int64]
    pool: NDArray[np.float64]
    log: NDArray[np.int64]
    base: NDArray[np.float64]  # bytes held in any case, per time; the last is a cost
    binds: NDArray[np.int64]  # number of binding times before each time
    used: NDArray[np.int64]


@inner
def touch(s: Store, v: int) -> None:
    """Queues a node: its choices, costs, edges or memory have changed."""
    s.node[v, STALE] = 1
    if not s.node[v, WAITING]:
        s.node[v, WAITING] = 1
        s.node[s.used[NODE_IN] % len(s.node), QUEUE] = v
        s.used[NODE_IN] += 1


@inner
def touch_edge(s: Store, e: int) -> None:
    """Queues an edge: its matrix has changed."""
    if not s.edge[e, CHANGED]:
        s.edge[e, CHANGED] = 1
        s.edge[s.used[EDGE_IN] % len(s.edge), LINE] = e
        s.used[EDGE_IN] += 1


@inner
def far(s: Store, h: int) -> int:
    """Returns the node at the other end of a half-edge."""
    return int(s.half[h ^ 1, OWNER])


@inner
def strides(s: Store, h: int) -> tuple[int, int]:
    """Returns the strides in the matrix to the next choice of the near end, and of the far end."""
    columns = s.node[s.half[h | 1, OWNER], SIZE]
    if h & 1:
        return 1, columns
    return columns, 1


@inner
def link(s: Store, v: int, h: int) -> None:
    """Adds a half-edge to the list of a node."""
    first = s.node[v, FIRST]
    s.half[h, OWNER] = v
    s.half[h, BEFORE] = NONE
    s.half[h, AFTER] = first
    if first != NONE:
        s.half[first, BEFORE] = h
    s.node[v, FIRST] = h
    s.node[v, DEGREE] += 1


@inner
def cut(s: Store, e: int) -> None:
    """Removes an edge."""
    for h in range(2 * e, 2 * e + 2):
        v, before, after = s.half[h, OWNER], s.half[h, BEFORE], s.half[h, AFTER]
        if before == NONE:
            s.node[v, FIRST] = after
        else:
            s.half[before, AFTER] = after
        if after != NONE:
            s.half[after, BEFORE] = before
        s.half[h, OWNER] = NONE
        s.node[v, DEGREE] -= 1
        touch(s, v)


@inner
def between(s: Store, a: int, b: int) -> int:
    """Returns the half-edge at a of the edge between two nodes, or NONE."""
    swap = s.node[a, DEGREE] > s.node[b, DEGREE]
    near, sought = (b, a) if swap else (a, b)
    h = s.node[near, FIRST]
    while h != NONE and far(s, h) != sought:
        h = s.half[h, AFTER]
    return int(h if h == NONE or not swap else h ^ 1)


@inner
def attach(s: Store, a: int, b: int, e: int, values: Floats) -> None:
    """Reattaches the removed edge e between a and b, or adds it to the existing edge.

    `values` is its matrix, shape (choices of a, of b). The pool must have room for it.
    """
    rows, columns = values.shape
    h = between(s, a, b)
    if h == NONE:
        h = 2 * e
        link(s, a, h)
        link(s, b, h + 1)
        if rows * columns > s.edge[e, ROOM]:
            s.edge[e, PLACE] = s.used[POOL]
            s.edge[e, ROOM] = rows * columns
            s.used[POOL] += rows * columns
        at = s.edge[e, PLACE]
        for k in range(rows * columns):
            s.pool[at + k] = 0.0
    near, step = strides(s, h)
    at = s.edge[h >> 1, PLACE]
    for i in range(rows):
        for j in range(columns):
            s.pool[at + i * near + j * step] += values[i, j]
    touch_edge(s, h >> 1)


@inner
def compress(pool: Any, at: int, keep: Flags) -> None:
    """Moves the kept entries together."""
    to = at
    for i in range(len(keep)):
        if keep[i]:
            pool[to] = pool[at + i]
            to += 1


@inner
def restrict(s: Store, v: int, keep: Flags) -> bool:
    """Drops choices of a node. Returns False if none is left."""
    count, left = len(keep), 0
    for i in range(count):
        left += keep[i]
    if left == count:
        return True
    h = s.node[v, FIRST]
    while h != NONE:
        other = s.node[far(s, h), SIZE]
        at = s.edge[h >> 1, PLACE]
        to = at
        for k in range(count * other):
            if keep[k % count if h & 1 else k // other]:
                s.pool[to] = s.pool[at + k]
                to += 1
        touch_edge(s, h >> 1)
        touch(s, far(s, h))
        h = s.half[h, AFTER]
    compress(s.pool, s.node[v, START], keep)
    compress(s.log, s.node[v, START], keep)
    p = s.node[v, PIECES]
    while p != NONE:
        compress(s.pool, s.piece[p, HELD], keep)
        p = s.piece[p, NEXT]
    s.node[v, SIZE] = left
    touch(s, v)
    return left > 0


@inner
def hold(s: Store, v: int, p: int) -> None:
    """Gives a free piece to node v, or to the base if it is constant."""
    low, high, at = s.piece[p, LOW], s.piece[p, HIGH], s.piece[p, HELD]
    if s.binds[high] == s.binds[low]:
        return
    for i in range(1, s.node[v, SIZE]):
        if s.pool[at + i] != s.pool[at]:
            s.piece[p, NEXT] = s.node[v, PIECES]
            s.node[v, PIECES] = p
            return
    for t in range(low, high):
        s.base[t] += s.pool[at]


@inner
def note_choices(s: Store, v: int) -> None:
    """Writes a node and its choices into the log."""
    s.log[s.used[LOG]] = v
    s.log[s.used[LOG] + 1] = s.node[v, SIZE]
    s.used[LOG] += 2
    for i in range(s.node[v, SIZE]):
        note(s, v, i)


@inner
def note(s: Store, v: int, i: int) -> None:
    """Writes the original index of a choice of node v into the log."""
    s.log[s.used[LOG]] = s.log[s.node[v, START] + i]
    s.used[LOG] += 1


@inner
def begin_record(s: Store, v: int, neighbours: int) -> None:
    """Begins the record of a node's removal; its neighbours' choices follow, then its own."""
    s.node[s.used[RECORDS], RECORD] = s.used[LOG]
    s.used[RECORDS] += 1
    s.log[s.used[LOG]] = v
    s.log[s.used[LOG] + 1] = neighbours
    s.used[LOG] += 2

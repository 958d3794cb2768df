"""The compiled reductions of nodes and edges; each says why no optimum is lost."""

from __future__ import annotations

import numpy as np

from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.reduce.store import (
    AFTER,
    CHANGED,
    DEGREE,
    EDGE_IN,
    EDGE_OUT,
    FIRST,
    HELD,
    HIGH,
    LINE,
    LOG,
    LOT,
    LOW,
    NEXT,
    NODE_IN,
    NODE_OUT,
    NONE,
    OWNER,
    PIECES,
    PLACE,
    POOL,
    QUEUE,
    SIZE,
    START,
    WAITING,
    Floats,
    Ints,
    Store,
    attach,
    begin_record,
    cut,
    far,
    hold,
    note,
    note_choices,
    restrict,
    strides,
    touch,
    touch_edge,
)

DONE, POOL_FULL, LOG_FULL, EMPTY = range(4)


@inner
def keep_supported(s: Store, h: int) -> bool:
    """Drops choices whose every partner at a neighbour is forbidden (arc consistency).

    They are in no allowed solution. Returns False if no choice is left.
    """
    v = s.half[h, OWNER]
    near, step = strides(s, h)
    at, other = s.edge[h >> 1, PLACE], s.node[far(s, h), SIZE]
    keep = np.zeros(s.node[v, SIZE], np.bool_)
    for i in range(len(keep)):
        for j in range(other):
            if s.pool[at + i * near + j * step] < np.inf:
                keep[i] = True
                break
    return restrict(s, v, keep)


@inner
def fold_separable(s: Store, e: int) -> bool:
    """Removes an edge whose matrix is x_i + y_j, and adds x and y to its two nodes."""
    a, b = s.half[2 * e, OWNER], s.half[2 * e + 1, OWNER]
    rows, columns, at = s.node[a, SIZE], s.node[b, SIZE], s.edge[e, PLACE]
    least = at
    for k in range(at, at + rows * columns):
        if s.pool[k] == np.inf:
            return False
        if s.pool[k] < s.pool[least]:
            least = k
    # From its least entry on, every row and column only adds: nothing cancels.
    row = least - (least - at) % columns
    column = at + (least - at) % columns
    corner = s.pool[least]
    for i in range(rows):
        for j in range(columns):
            value = s.pool[at + i * columns + j]
            rest = value - s.pool[column + i * columns] - (s.pool[row + j] - corner)
            if not abs(rest) <= 8.9e-16 * abs(value):
                return False
    for i in range(rows):
        s.pool[s.node[a, START] + i] += s.pool[column + i * columns]
    for j in range(columns):
        s.pool[s.node[b, START] + j] += s.pool[row + j] - corner
    cut(s, e)
    return True


@inner
def only_partners(s: Store, h: int) -> Ints:
    """Returns for every choice of the half-edge's node its only allowed partner at the far end.

    Empty if some choice has several partners.
    """
    near, step = strides(s, h)
    at, other = s.edge[h >> 1, PLACE], s.node[far(s, h), SIZE]
    only = np.empty(s.node[s.half[h, OWNER], SIZE], np.int64)
    for i in range(len(only)):
        only[i] = NONE
        for j in range(other):
            if s.pool[at + i * near + j * step] < np.inf:
                if only[i] != NONE:
                    return only[:0]
                only[i] = j
    return only


@inner
def contract(s: Store, h: int, only: Ints) -> None:
    """Merges the node at the far end of h into the near one, whose every choice has one partner.

    The far node's costs, matrices and memory then depend on the near node's choice alone.
    """
    u, v, count = s.half[h, OWNER], far(s, h), len(only)
    near, step = strides(s, h)
    at = s.edge[h >> 1, PLACE]
    begin_record(s, v, 1)
    note_choices(s, u)
    for i in range(count):
        note(s, v, only[i])
        paid = s.pool[s.node[v, START] + only[i]] + s.pool[at + i * near + only[i] * step]
        s.pool[s.node[u, START] + i] += paid
    cut(s, h >> 1)
    while s.node[v, FIRST] != NONE:
        g = s.node[v, FIRST]
        w, at = far(s, g), s.edge[g >> 1, PLACE]
        near, step = strides(s, g)
        values = np.empty((count, s.node[w, SIZE]))
        for i in range(count):
            for j in range(s.node[w, SIZE]):
                values[i, j] = s.pool[at + only[i] * near + j * step]
        cut(s, g >> 1)
        attach(s, u, w, g >> 1, values)
    p = s.node[v, PIECES]
    while p != NONE:
        following, at = s.piece[p, NEXT], s.piece[p, HELD]
        carried = np.empty(count)
        for i in range(count):
            carried[i] = s.pool[at + only[i]]
        if count > s.piece[p, LOT]:
            s.piece[p, HELD] = at = s.used[POOL]
            s.piece[p, LOT] = count
            s.used[POOL] += count
        for i in range(count):
            s.pool[at + i] = carried[i]
        hold(s, u, p)
        p = following
    s.node[v, SIZE] = 0
    touch(s, u)


@inner
def burden(s: Store, v: int) -> int:
    """Returns the entries that move with node v per choice of the node that it merges into."""
    entries, h, p = 0, s.node[v, FIRST], s.node[v, PIECES]
    while h != NONE:
        entries += s.node[far(s, h), SIZE]
        h = s.half[h, AFTER]
    while p != NONE:
        entries += 1
        p = s.piece[p, NEXT]
    return entries


@inner
def lack(s: Store, entries: int, notes: int) -> int:
    """Returns POOL_FULL or LOG_FULL if the pool or the log lacks room for the entries, or DONE."""
    if s.used[POOL] + entries > len(s.pool):
        return POOL_FULL
    return LOG_FULL if s.used[LOG] + notes + 8 > len(s.log) else DONE


@inner
def simplify_edge(s: Store, e: int) -> int:
    """Simplifies one edge. Returns DONE, EMPTY (no choice), or the pool or log that is full."""
    h = 2 * e
    if not (keep_supported(s, h) and keep_supported(s, h + 1)):
        return EMPTY
    if fold_separable(s, e):
        return DONE
    rows, columns = s.node[s.half[h, OWNER], SIZE], s.node[s.half[h + 1, OWNER], SIZE]
    only = only_partners(s, h)
    if len(only) == 0 or (rows == columns and burden(s, far(s, h)) > burden(s, s.half[h, OWNER])):
        h += 1
        only = only_partners(s, h)
        if len(only) == 0:
            h -= 1
            only = only_partners(s, h)
    if len(only) == 0:
        return DONE
    status = lack(s, len(only) * burden(s, far(s, h)), 2 * len(only))
    if status == DONE:
        contract(s, h, only)
    return status


@inner
def settle_single(s: Store, v: int) -> None:
    """Removes a node with a single choice, whose cost and memory are certain."""
    begin_record(s, v, 0)
    note(s, v, 0)
    s.base[-1] += s.pool[s.node[v, START]]
    while s.node[v, FIRST] != NONE:
        h = s.node[v, FIRST]
        w, at = far(s, h), s.edge[h >> 1, PLACE]
        for j in range(s.node[w, SIZE]):
            s.pool[s.node[w, START] + j] += s.pool[at + j]
        cut(s, h >> 1)
    p = s.node[v, PIECES]
    while p != NONE:
        for t in range(s.piece[p, LOW], s.piece[p, HIGH]):
            s.base[t] += s.pool[s.piece[p, HELD]]
        p = s.piece[p, NEXT]
    s.node[v, SIZE] = 0


@inner
def cheapest(least: Floats, best: Ints, left: float, right: Floats, k: int) -> None:
    """Records choice k where left + right is less; branch-free, so that it is vectorised."""
    for j in range(len(least)):
        value = left + right[j]
        less = value < least[j]
        least[j] = value if less else least[j]
        best[j] = k if less else best[j]


@inner
def eliminate(s: Store, v: int) -> None:
    """Eliminates a node of degree 1 or 2 whose memory does not matter (R1, R2).

    Its best choice is a function of its neighbours', and its least cost becomes a cost of one
    neighbour or a matrix of two.
    """
    count, g = s.node[v, SIZE], s.node[v, FIRST]
    h = s.half[g, AFTER]
    a, b = far(s, g), NONE if h == NONE else far(s, h)
    rows, columns = s.node[a, SIZE], 1 if h == NONE else s.node[b, SIZE]
    near, step = strides(s, g)
    at, at_b, near_b, step_b = s.edge[g >> 1, PLACE], 0, 0, 0
    begin_record(s, v, 1 if h == NONE else 2)
    note_choices(s, a)
    if h != NONE:
        note_choices(s, b)
        near_b, step_b = strides(s, h)
        at_b = s.edge[h >> 1, PLACE]
    right = np.empty((count, columns))
    for k in range(count):
        for j in range(columns):
            right[k, j] = 0.0 if h == NONE else s.pool[at_b + k * near_b + j * step_b]
    values, best = np.full((rows, columns), np.inf), np.zeros(columns, np.int64)
    for i in range(rows):
        best[:] = 0
        for k in range(count):
            left = s.pool[at + k * near + i * step] + s.pool[s.node[v, START] + k]
            if left < np.inf:
                cheapest(values[i], best, left, right[k], k)
        for j in range(columns):
            note(s, v, best[j])
    cut(s, g >> 1)
    if h == NONE:
        for i in range(rows):
            s.pool[s.node[a, START] + i] += values[i, 0]
    else:
        cut(s, h >> 1)
        attach(s, a, b, g >> 1, values)
    s.node[v, SIZE] = 0


@inner
def memory_free(s: Store, v: int) -> bool:
    """Returns whether the node's choice cannot affect whether memory suffices."""
    p = s.node[v, PIECES]
    while p != NONE:
        if s.binds[s.piece[p, HIGH]] != s.binds[s.piece[p, LOW]]:
            return False
        p = s.piece[p, NEXT]
    return True


@inner
def simplify_node(s: Store, v: int) -> int:
    """Simplifies one node. Returns as `simplify_edge` does."""
    start, degree = s.node[v, START], s.node[v, DEGREE]
    alone = degree == 0 and memory_free(s, v)  # takes its cheapest choice (R0)
    keep, best = np.empty(s.node[v, SIZE], np.bool_), 0
    for i in range(len(keep)):
        keep[i] = s.pool[start + i] < np.inf
        if s.pool[start + i] < s.pool[start + best]:
            best = i
    for i in range(len(keep)):
        keep[i] = keep[i] and (i == best or not alone)
    if not restrict(s, v, keep):
        return EMPTY
    status = DONE
    if s.node[v, SIZE] == 1:
        status = lack(s, 0, 1)
        if status == DONE:
            settle_single(s, v)
    elif degree <= 2 and degree > 0 and memory_free(s, v):
        g = s.node[v, FIRST]
        h = s.half[g, AFTER]
        rows, columns = s.node[far(s, g), SIZE], 1 if h == NONE else s.node[far(s, h), SIZE]
        status = lack(s, rows * columns, rows * columns + rows + columns)
        if status == DONE:
            eliminate(s, v)
    return status


@entry
def settle(s: Store) -> int:
    """Simplifies nodes and edges wherever something changed. Returns as `simplify_edge` does."""
    while True:
        status = DONE
        if s.used[NODE_OUT] < s.used[NODE_IN]:
            v = s.node[s.used[NODE_OUT] % len(s.node), QUEUE]
            s.used[NODE_OUT] += 1
            s.node[v, WAITING] = 0
            if s.node[v, SIZE]:
                status = simplify_node(s, v)
                if status:
                    touch(s, v)
        elif s.used[EDGE_OUT] < s.used[EDGE_IN]:
            e = s.edge[s.used[EDGE_OUT] % len(s.edge), LINE]
            s.used[EDGE_OUT] += 1
            s.edge[e, CHANGED] = 0
            if s.half[2 * e, OWNER] != NONE:
                status = simplify_edge(s, e)
                if status:
                    touch_edge(s, e)
        else:
            return DONE
        if status:
            return status

"""Applies reductions to a fixpoint on flat arrays, and expands choices back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.reduce.dominance import dominate_stale
from autopar.intra_op.reduce.flat import Flat, Floats, Ints, offsets
from autopar.intra_op.reduce.memory import update_memory
from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.reduce.rules import DONE, EMPTY, POOL_FULL, settle
from autopar.intra_op.reduce.store import (
    DEGREE,
    HELD,
    HIGH,
    LOG,
    LOW,
    NEXT,
    NODE_IN,
    NODE_OUT,
    NONE,
    OWNER,
    PIECES,
    PLACE,
    POOL,
    RECORD,
    RECORDS,
    ROOM,
    SIZE,
    STALE,
    START,
    WAITING,
    Store,
    attach,
    between,
    hold,
    link,
    touch,
    touch_edge,
)


@dataclass(frozen=True)
class Reduced:
    """The reduced problem, and how to expand its choices.

    Args:
        flat: the smaller problem.
        nodes: the original index of each of its nodes.
        ident: the original index of each of its choices, among those of its node.
        log, records: the eliminations, see `store`.
        count: the number of nodes of the original problem.
    """

    flat: Flat
    nodes: Ints
    ident: Ints
    log: Ints
    records: Ints
    count: int

    def expand(self, choice: Ints) -> Ints:
        """Returns the best choice for the original problem, given one for the smaller."""
        full = np.full(self.count, NONE, dtype=np.int64)
        full[self.nodes] = self.ident[self.flat.start[:-1] + choice]
        _replay(self.log, self.records, full)
        return full


def run(flat: Flat, name: str) -> Reduced:
    """Applies all reductions until none changes anything.

    Raises:
        InfeasibleError: every choice is forbidden or does not fit.
    """
    store = _store(flat)
    while True:
        status = settle(store)
        if status == EMPTY:
            raise _nothing_left(name)
        if status != DONE:
            store = _grown(store, status == POOL_FULL)
            continue
        peak = update_memory(store, flat.limit) if len(flat.base) else 0.0
        if peak > 0:
            raise _nothing_left(name) if peak == math.inf else _too_little(name, peak, flat.limit)
        if store.used[NODE_OUT] < store.used[NODE_IN]:
            continue
        if not dominate_stale(store):
            raise _nothing_left(name)
        if store.used[NODE_OUT] == store.used[NODE_IN]:
            return _gathered(store, flat)


def _nothing_left(name: str) -> InfeasibleError:
    return InfeasibleError(
        "every choice of a node is forbidden",
        where=f"problem {name!r}",
        why="each has a forbidden cost, or only forbidden pairs, or exceeds memory",
        todo="allow more layouts, or more memory",
    )


def _too_little(name: str, peak: float, limit: float) -> InfeasibleError:
    return InfeasibleError(
        "no choice fits in memory",
        where=f"problem {name!r}",
        why=f"least attainable peak: at least {peak:.6g} bytes, limit: {limit:.6g} bytes",
        todo="use more devices, a smaller batch, state sharding or recomputation",
    )


def _store(flat: Flat) -> Store:
    sizes = np.diff(flat.start)
    choices, entries, times = len(flat.cost), len(flat.matrix), len(flat.base)
    node = np.full((flat.nodes, 9), NONE, dtype=np.int64)
    node[:, SIZE], node[:, START] = sizes, flat.start[:-1]
    node[:, [DEGREE, WAITING, STALE]] = 0
    half = np.full((2 * len(flat.ends), 3), NONE, dtype=np.int64)
    edge = np.zeros((len(flat.ends), 4), dtype=np.int64)
    edge[:, PLACE], edge[:, ROOM] = choices + flat.place[:-1], np.diff(flat.place)
    lengths = np.diff(flat.held)
    begins = choices + entries + flat.held[:-1]
    piece = np.column_stack([flat.span[:, 1:], begins, lengths, np.full(len(lengths), NONE)])
    full = choices + entries + len(flat.nbytes)
    pool = np.empty(full + full // 2 + 1000)
    pool[:full] = np.concatenate([flat.cost, flat.matrix, flat.nbytes])
    log = np.zeros(5 * choices + 1000, dtype=np.int64)
    log[:choices] = np.arange(choices) - np.repeat(flat.start[:-1], sizes)
    used = np.zeros(7, dtype=np.int64)
    used[POOL], used[LOG] = full, choices
    base = np.append(flat.base, flat.total)
    store = Store(node, half, edge, piece, pool, log, base, np.arange(times + 1), used)
    _enter(store, np.ascontiguousarray(flat.ends), np.ascontiguousarray(flat.span[:, 0]))
    return store


@entry
def _enter(s: Store, ends: Ints, owners: Ints) -> None:
    """Links edges and pieces to their nodes, merging parallel edges by adding their matrices."""
    for e in range(len(ends)):
        a, b = ends[e, 0], ends[e, 1]
        if between(s, a, b) == NONE:
            link(s, a, 2 * e)
            link(s, b, 2 * e + 1)
            touch_edge(s, e)
        else:
            rows, columns = s.node[a, SIZE], s.node[b, SIZE]
            values = np.empty((rows, columns))
            for i in range(rows):
                for j in range(columns):
                    values[i, j] = s.pool[s.edge[e, PLACE] + i * columns + j]
            attach(s, a, b, e, values)
    for p in range(len(owners)):
        hold(s, owners[p], p)
    for v in range(len(s.node)):
        touch(s, v)


def _grown(s: Store, pool: bool) -> Store:
    if pool:
        return s._replace(pool=_longer(s.pool, s.used[POOL]))
    return s._replace(log=_longer(s.log, s.used[LOG]))


def _longer(values: Any, used: int) -> Any:
    longer = np.empty(2 * len(values), dtype=values.dtype)
    longer[:used] = values[:used]
    return longer


def _gathered(s: Store, flat: Flat) -> Reduced:
    nodes = np.flatnonzero(s.node[:, SIZE])
    sizes = s.node[nodes, SIZE]
    position = np.zeros(len(s.node), dtype=np.int64)
    position[nodes] = np.arange(len(nodes))
    owners = s.half[:, OWNER].reshape(-1, 2)
    edges = np.flatnonzero(owners[:, 0] != NONE)
    ends = position[owners[edges]]
    pieces = _pieces(s)
    lengths = sizes[position[pieces[:, 0]]]
    areas = sizes[ends[:, 0]] * sizes[ends[:, 1]]
    begins = s.node[nodes, START]
    small = Flat(
        offsets(sizes),
        _runs(s.pool, begins, sizes),
        ends,
        offsets(areas),
        _runs(s.pool, s.edge[edges, PLACE], areas),
        np.column_stack([position[pieces[:, 0]], s.piece[pieces[:, 1]][:, [LOW, HIGH]]]),
        offsets(lengths),
        _runs(s.pool, s.piece[pieces[:, 1], HELD], lengths),
        np.where(np.diff(s.binds) > 0, s.base[:-1], 0.0),
        flat.limit,
        float(s.base[-1]),
    )
    ident = _runs(s.log, begins, sizes)
    log, records = s.log[: s.used[LOG]].copy(), s.node[: s.used[RECORDS], RECORD].copy()
    return Reduced(small, nodes, ident, log, records, len(s.node))


def _runs(pool: Floats | Ints, begins: Ints, lengths: Ints) -> Any:
    """Returns the entries of several runs of the pool, concatenated."""
    index = np.repeat(begins - offsets(lengths)[:-1], lengths) + np.arange(lengths.sum())
    return pool[index]


def _pieces(s: Store) -> Ints:
    """Returns (node, piece) of all pieces, shape (pieces, 2)."""
    pieces = np.empty((len(s.piece), 2), dtype=np.int64)
    return pieces[: _list_pieces(s, pieces)]


@entry
def _list_pieces(s: Store, found: Ints) -> int:
    count = 0
    for v in range(len(s.node)):
        p = s.node[v, PIECES] if s.node[v, SIZE] else NONE
        while p != NONE:
            found[count, 0] = v
            found[count, 1] = p
            count += 1
            p = s.piece[p, NEXT]
    return count


@entry
def _replay(log: Ints, records: Ints, full: Ints) -> None:
    """Reads off the choice of every eliminated node, the last one first."""
    for k in range(len(records) - 1, -1, -1):
        at = records[k]
        v, neighbours = log[at], log[at + 1]
        at += 2
        row = 0
        for _ in range(neighbours):
            size = log[at + 1]
            row = row * size + _place_in(log, at + 2, size, full[log[at]])
            at += 2 + size
        full[v] = log[at + row]


@inner
def _place_in(log: Ints, at: int, size: int, choice: int) -> int:
    for i in range(size):
        if log[at + i] == choice:
            return i
    return NONE

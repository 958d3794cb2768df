"""Sequential tree-reweighted message passing (TRW-S), compiled.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", IEEE PAMI 28
(2006). Messages move costs between edges and nodes so that the sum of the least entries, each taken
independently, is as large as possible: this sum is a lower bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.intra_op.reduce.flat import Flat, Floats, Ints, offsets
from autopar.intra_op.reduce.numba_compile import entry, inner


class Links(NamedTuple):
    """A problem's graph: matrices, and per node its half-edges, 2 e at the first end of edge e.

    Message h is the cost that edge h // 2 adds to the choices of half-edge h's node.
    """

    start: Ints
    ends: Ints
    place: Ints
    matrix: Floats
    first: Ints  # start of each node's half-edges in `halves`
    halves: Ints
    message: Ints  # start of each half-edge's message


def links(flat: Flat) -> Links:
    """Returns the graph of a problem without parallel edges."""
    owners = flat.ends.reshape(-1)
    halves = np.argsort(owners, kind="stable")
    first = offsets(np.bincount(owners, minlength=flat.nodes).astype(np.int64))
    message = offsets(np.diff(flat.start)[owners])
    return Links(flat.start, flat.ends, flat.place, flat.matrix, first, halves, message)


@inner
def near(g: Links, h: int) -> tuple[int, int, int, int, int]:
    """Returns the far node, the matrix's start, its strides (near, far), and the far choices."""
    e = h >> 1
    v, w = g.ends[e, h & 1], g.ends[e, 1 - (h & 1)]
    count, other = g.start[v + 1] - g.start[v], g.start[w + 1] - g.start[w]
    if h & 1:
        return w, g.place[e], 1, count, other
    return w, g.place[e], other, 1, other


@inner
def _belief(g: Links, cost: Floats, messages: Floats, v: int, view: Floats) -> float:
    """Writes a node's costs plus all its messages into `view`; returns the least."""
    count = g.start[v + 1] - g.start[v]
    for i in range(count):
        view[i] = cost[g.start[v] + i]
    for k in range(g.first[v], g.first[v + 1]):
        at = g.message[g.halves[k]]
        for i in range(count):
            view[i] += messages[at + i]
    least = np.inf
    for i in range(count):
        least = min(least, view[i])
    return least


@inner
def _least(line: Floats, less: Floats) -> float:
    """Returns the least of line - less, four at a time so that the additions do not wait."""
    a, b, c, d = np.inf, np.inf, np.inf, np.inf
    whole = len(line) - len(line) % 4
    for j in range(0, whole, 4):
        a = min(a, line[j] - less[j])
        b = min(b, line[j + 1] - less[j + 1])
        c = min(c, line[j + 2] - less[j + 2])
        d = min(d, line[j + 3] - less[j + 3])
    for j in range(whole, len(line)):
        a = min(a, line[j] - less[j])
    return min(min(a, b), min(c, d))


@inner
def _line(g: Links, messages: Floats, e: int, i: int, rest: Floats) -> Floats:
    """Returns line i of edge e's matrix; writes the costs that messages have moved into `rest`."""
    columns, one, two = len(rest), g.message[2 * e], g.message[2 * e + 1]
    for j in range(columns):
        rest[j] = messages[one + i] + messages[two + j]
    return g.matrix[g.place[e] + i * columns : g.place[e] + (i + 1) * columns]


@inner
def _gather(g: Links, messages: Floats, h: int) -> None:
    """Moves the least cost of an edge, for each choice of the half-edge's node, to that node."""
    _, at, _, far_step, other = near(g, h)
    v = g.ends[h >> 1, h & 1]
    count, own, theirs = g.start[v + 1] - g.start[v], g.message[h], g.message[h ^ 1]
    if far_step == 1:
        for i in range(count):
            least, line = np.inf, at + i * other
            for j in range(other):
                value = g.matrix[line + j] - messages[theirs + j]
                least = value if value < least else least
            messages[own + i] = least
        return
    for i in range(count):
        messages[own + i] = np.inf
    for j in range(other):
        less, line = messages[theirs + j], at + j * count
        for i in range(count):
            value = g.matrix[line + i] - less
            messages[own + i] = value if value < messages[own + i] else messages[own + i]


@entry
def sweep(g: Links, cost: Floats, messages: Floats, guess: Ints, backward: bool) -> None:
    """Moves the costs of every edge to the node that is visited first, and on to later edges.

    `guess` becomes each node's best choice given those of earlier nodes.
    """
    _visit(g, cost, messages, guess, backward, True)


@entry
def sweeps(g: Links, cost: Floats, messages: Floats, guess: Ints, first: int, last: int) -> None:
    """Sweeps as often as there are numbers from `first` to before `last`, backward at odd ones."""
    for k in range(first, last):
        _visit(g, cost, messages, guess, k % 2 == 1, k == last - 1)


@inner
def _visit(
    g: Links, cost: Floats, messages: Floats, guess: Ints, backward: bool, guesses: bool
) -> None:
    nodes, widest = len(g.start) - 1, np.max(np.diff(g.start))
    view, value = np.empty(widest), np.empty(widest)
    for step in range(nodes):
        v = nodes - 1 - step if backward else step
        count, before = g.start[v + 1] - g.start[v], 0
        for k in range(g.first[v], g.first[v + 1]):
            h = g.halves[k]
            if (near(g, h)[0] < v) != backward:
                _gather(g, messages, h)
                before += 1
        least = _belief(g, cost, messages, v, view)
        if guesses:
            guess[v] = _best_given(g, messages, v, view, guess, backward, value)
        degree = g.first[v + 1] - g.first[v]
        share = 1.0 / max(before, degree - before, 1)
        for k in range(g.first[v], g.first[v + 1]):
            h = g.halves[k]
            if (near(g, h)[0] > v) != backward:
                for i in range(count):
                    messages[g.message[h] + i] -= share * (view[i] - least)


@inner
def _best_given(
    g: Links, messages: Floats, v: int, view: Floats, guess: Ints, backward: bool, value: Floats
) -> int:
    """Returns the best choice of a node given the guesses of earlier nodes; overwrites `value`."""
    count = g.start[v + 1] - g.start[v]
    for i in range(count):
        value[i] = view[i]
    for k in range(g.first[v], g.first[v + 1]):
        h = g.halves[k]
        w, at, step, far_step, _ = near(g, h)
        if (w < v) != backward:
            line, own = at + guess[w] * far_step, g.message[h]
            theirs = messages[g.message[h ^ 1] + guess[w]]
            for i in range(count):
                value[i] += g.matrix[line + i * step]
                value[i] -= messages[own + i] + theirs
    best = 0
    for i in range(1, count):
        if value[i] < value[best]:
            best = i
    return best


@entry
def lower_bound(g: Links, cost: Floats, messages: Floats, least: Ints) -> float:
    """Returns the sum of the least entries.

    Writes into `least` the cheapest choice of each node.
    """
    total, view = 0.0, np.empty(np.max(np.diff(g.start)))
    for v in range(len(g.start) - 1):
        lowest = _belief(g, cost, messages, v, view)
        total += lowest
        for i in range(g.start[v + 1] - g.start[v]):
            if view[i] == lowest:
                least[v] = i
    for e in range(len(g.ends)):
        a, b = g.ends[e, 0], g.ends[e, 1]
        rows, columns = g.start[a + 1] - g.start[a], g.start[b + 1] - g.start[b]
        lowest, rest = np.inf, view[:columns]
        for i in range(rows):
            lowest = min(lowest, _least(_line(g, messages, e, i, rest), rest))
        total += lowest
    return total


@entry
def bound(g: Links, cost: Floats, messages: Floats, excess: Floats, least: Ints) -> float:
    """Returns the sum of the least entries.

    Writes into `excess` the least rise of the bound if a choice is taken, and into `least` the
    cheapest choice of each node.
    """
    size = np.max(np.diff(g.start))
    total, view, more = 0.0, np.empty(size), np.empty(size)
    for v in range(len(g.start) - 1):
        lowest = _belief(g, cost, messages, v, view)
        total += lowest
        for i in range(g.start[v + 1] - g.start[v]):
            excess[g.start[v] + i] = view[i] - lowest
            if view[i] == lowest:
                least[v] = i
    for e in range(len(g.ends)):
        a, b = g.ends[e, 0], g.ends[e, 1]
        rows, columns = g.start[a + 1] - g.start[a], g.start[b + 1] - g.start[b]
        left, right = np.full(rows, np.inf), np.full(columns, np.inf)
        lowest, rest = np.inf, more[:columns]
        for i in range(rows):
            line = _line(g, messages, e, i, rest)
            left[i] = _least(line, rest)
            lowest = min(lowest, left[i])
            for j in range(columns):
                value = line[j] - rest[j]
                right[j] = value if value < right[j] else right[j]
        total += lowest
        for i in range(rows):
            excess[g.start[a] + i] += left[i] - lowest
        for j in range(columns):
            excess[g.start[b] + j] += right[j] - lowest
    return total

"""Dynamic programs over random forests: many nodes take their best choices at once, given the rest.

Of a list of nodes, each in turn joins the forest unless it would close a cycle of its edges. The
best choices of the forest, given the choices of all other nodes, follow from one pass from the
leaves to the roots and one back. Hamze and de Freitas, "From Fields to Trees" (UAI 2004), draw
samples in this way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.intra_op.reduce.flat import Floats, Ints
from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.solvers._moves import Local
from autopar.intra_op.solvers._trws import near


class Forest(NamedTuple):
    """Working space for a forest of up to all nodes of a problem.

    Args:
        nodes: candidates, then the forest's nodes, parents before children.
        place: place of every node of the problem in `nodes`; -1 outside the forest.
        parent: place of each node's parent, or -1.
        edge: each node's half-edge to its parent.
        group, seen: union-find of the growing trees, and the last node to touch each.
        begin, value: cost of every choice of a node, with its subtree and all fixed neighbours.
        answer: best choice of a node for every choice of its parent, at `reply`.
        taken: new choice of each node.
    """

    nodes: Ints
    place: Ints
    parent: Ints
    edge: Ints
    group: Ints
    seen: Ints
    begin: Ints
    value: Floats
    reply: Ints
    answer: Ints
    taken: Ints


def forest(s: Local) -> Forest:
    """Returns working space for forests of a problem."""
    sizes = np.diff(s.graph.start)
    n, widest = len(sizes), int(sizes.max(initial=1))
    return Forest(
        nodes=np.zeros(n, dtype=np.int64),
        place=np.full(n, -1, dtype=np.int64),
        parent=np.zeros(n, dtype=np.int64),
        edge=np.zeros(n, dtype=np.int64),
        group=np.zeros(n, dtype=np.int64),
        seen=np.zeros(n, dtype=np.int64),
        begin=np.zeros(n + 1, dtype=np.int64),
        value=np.zeros(len(s.cost)),
        reply=np.zeros(n, dtype=np.int64),
        answer=np.zeros(n * widest, dtype=np.int64),
        taken=np.zeros(n, dtype=np.int64),
    )


@inner
def _root(group: Ints, k: int) -> int:
    while group[k] != k:
        group[k] = group[group[k]]
        k = group[k]
    return k


@inner
def _joins(s: Local, f: Forest, v: int, count: int) -> bool:
    """Adds node v at place `count` and returns True, unless that closes a cycle."""
    g = s.graph
    for k in range(g.first[v], g.first[v + 1]):
        at = f.place[near(g, g.halves[k])[0]]
        if at >= 0:
            root = _root(f.group, at)
            if f.seen[root] == v:
                return False
            f.seen[root] = v
    f.group[count] = count
    f.seen[count] = -1
    for k in range(g.first[v], g.first[v + 1]):
        at = f.place[near(g, g.halves[k])[0]]
        if at >= 0:
            f.group[_root(f.group, at)] = count
    f.place[v] = count
    return True


@inner
def _grow(s: Local, f: Forest, candidates: int) -> int:
    """Keeps nodes among the first `candidates` that form a forest; returns their number."""
    count = 0
    for k in range(candidates):
        v = f.nodes[k]
        if _joins(s, f, v, count):
            f.nodes[count] = v
            count += 1
    return count


@inner
def _arrange(s: Local, f: Forest, cost: Floats, choice: Ints, count: int) -> None:
    """Puts parents before children, and writes the costs of choices given the fixed neighbours."""
    g, waiting = s.graph, len(f.place)
    for k in range(count):
        f.place[f.nodes[k]] = waiting
        f.group[k] = f.nodes[k]
    placed, at, filled = 0, 0, 0
    for k in range(count):
        if f.place[f.group[k]] != waiting:
            continue
        f.nodes[placed], f.place[f.group[k]], f.parent[placed] = f.group[k], placed, -1
        placed += 1
        while at < placed:
            v = f.nodes[at]
            size = g.start[v + 1] - g.start[v]
            f.begin[at] = filled
            view = f.value[filled : filled + size]
            view[:] = cost[g.start[v] : g.start[v + 1]]
            filled += size
            for m in range(g.first[v], g.first[v + 1]):
                w, line, step, far_step, _ = near(g, g.halves[m])
                if f.place[w] == waiting:
                    f.nodes[placed], f.place[w] = w, placed
                    f.parent[placed], f.edge[placed] = at, g.halves[m] ^ 1
                    placed += 1
                elif f.place[w] < 0:
                    line += choice[w] * far_step
                    for r in range(size):
                        view[r] += min(g.matrix[line + r * step], s.big)
            at += 1
    f.begin[count] = filled


@inner
def _paid(s: Local, f: Forest, choice: Ints, count: int) -> float:
    """Returns the cost of the forest's present choices, before the pass to the roots."""
    total = 0.0
    for k in range(count):
        total += f.value[f.begin[k] + choice[f.nodes[k]]]
        if f.parent[k] >= 0:
            w, at, step, far_step, _ = near(s.graph, f.edge[k])
            entry_at = at + choice[f.nodes[k]] * step + choice[w] * far_step
            total += min(s.graph.matrix[entry_at], s.big)
    return total


@inner
def _decide(s: Local, f: Forest, count: int, asked: int) -> float:
    """Writes the best choices into `taken`; returns their cost.

    The first node takes choice `asked` unless that is negative.
    """
    g, answers, total = s.graph, 0, 0.0
    for k in range(count - 1, 0, -1):
        if f.parent[k] < 0:
            continue
        _, at, step, far_step, upper = near(g, f.edge[k])
        above = f.begin[f.parent[k]]
        f.reply[k] = answers
        for i in range(upper):
            least, best = np.inf, 0
            for j in range(f.begin[k + 1] - f.begin[k]):
                price = f.value[f.begin[k] + j]
                price += min(g.matrix[at + j * step + i * far_step], s.big)
                if price < least:
                    least, best = price, j
            f.value[above + i] += least
            f.answer[answers + i] = best
        answers += upper
    for k in range(count):
        if f.parent[k] >= 0:
            f.taken[k] = f.answer[f.reply[k] + f.taken[f.parent[k]]]
            continue
        f.taken[k] = np.argmin(f.value[f.begin[k] : f.begin[k + 1]])
        if k == 0 and asked >= 0:
            f.taken[k] = asked
        total += f.value[f.begin[k] + f.taken[k]]
    return total


@inner
def resolve(
    s: Local, f: Forest, cost: Floats, choice: Ints, candidates: int, asked: int
) -> tuple[int, float]:
    """Solves a forest of the first candidates in `f.nodes` given all other nodes' choices.

    Args:
        s: the problem.
        f: working space with the candidates; its `nodes` and `taken` become the solution.
        cost: cost of every choice, including the price of its memory.
        choice: present choice of every node.
        candidates: number of candidates.
        asked: choice that the first candidate takes in any case; -1 for its best one.

    Returns:
        The number of nodes in the forest, and the rise of the cost if they take their new choices.
    """
    count = _grow(s, f, candidates)
    _arrange(s, f, cost, choice, count)
    before = _paid(s, f, choice, count)
    after = _decide(s, f, count, asked)
    for k in range(count):
        f.place[f.nodes[k]] = -1
    return count, after - before


@entry
def forests(s: Local, f: Forest, cost: Floats, choice: Ints, rounds: int, seed: int) -> None:
    """Solves random forests over all nodes, one after the other, and takes the new choices."""
    np.random.seed(seed)
    n = len(choice)
    for _ in range(rounds):
        f.nodes[:n] = np.random.permutation(n)
        count, _ = resolve(s, f, cost, choice, n, -1)
        for k in range(count):
            choice[f.nodes[k]] = f.taken[k]

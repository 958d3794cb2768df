"""Changes of many nodes at once, exact where they form a tree, compiled.

A block grows from a random node by neighbours of which just one is in it already, so that what is
between its nodes is a tree, and dynamic programming finds its best choices beside those of all
other nodes. Memory is priced per byte and time meanwhile. Hamze & de Freitas, "From Fields to
Trees" (UAI 2004), draw samples in blocks that are trees; here the best replaces the sample. Mostly
the first node is told to change, and the block becomes the best beside that: a kick to which
hundreds of nodes answer at once.
"""

from __future__ import annotations

import numpy as np

from autopar.intra_op.reduce.flat import Floats, Ints
from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.solvers._moves import FITTING, Local, descend, judged, shift, walk
from autopar.intra_op.solvers._trws import near


@inner
def _grow(s: Local, root: int, most: int, block: Ints, parent: Ints, inside: Ints) -> int:
    """Writes the nodes of a block, each behind its parent, with the half-edges to those.

    It grows at random: other trees join the same nodes.

    Returns how many there are; `inside` holds a node's place in the block, or -1.
    """
    g = s.graph
    block[0], parent[0], inside[root] = root, -1, 0
    count, at = 1, 0
    while at < count < most:
        other = np.random.randint(at, count)
        block[at], block[other] = block[other], block[at]
        parent[at], parent[other] = parent[other], parent[at]
        inside[block[at]], inside[block[other]] = at, other
        u = block[at]
        at += 1
        degree = g.first[u + 1] - g.first[u]
        turn = np.random.randint(max(degree, 1))
        for k in range(degree):
            w = near(g, g.halves[g.first[u] + (k + turn) % degree])[0]
            if inside[w] >= 0 or count == most:
                continue
            touching, edge = 0, -1
            for m in range(g.first[w], g.first[w + 1]):
                if inside[near(g, g.halves[m])[0]] >= 0:
                    touching += 1
                    edge = g.halves[m]
            if touching == 1:
                block[count], parent[count], inside[w] = w, edge, count
                count += 1
    return count


@inner
def _alone(s: Local, choice: Ints, inside: Ints, v: int, priced: Floats, view: Floats) -> None:
    """Writes what each choice of a node costs with its memory, and beside nodes outside."""
    g = s.graph
    count = g.start[v + 1] - g.start[v]
    for r in range(count):
        view[r] = s.cost[g.start[v] + r]
        for p in range(s.first[v], s.first[v + 1]):
            view[r] += s.nbytes[s.begin[p] + r] * (priced[s.high[p]] - priced[s.low[p]])
    for k in range(g.first[v], g.first[v + 1]):
        w, at, step, far_step, _ = near(g, g.halves[k])
        if inside[w] < 0:
            line = at + choice[w] * far_step
            for r in range(count):
                view[r] += min(g.matrix[line + r * step], s.big)


@inner
def _best(
    s: Local,
    choice: Ints,
    block: Ints,
    parent: Ints,
    inside: Ints,
    count: int,
    priced: Floats,
    asked: int,
) -> Ints:
    """The best choices of a block: from its leaves to its root, and back.

    The root takes the choice that is asked of it, or its best one if it has that already.
    """
    g = s.graph
    start = np.zeros(count + 1, np.int64)
    for b in range(count):
        start[b + 1] = start[b] + g.start[block[b] + 1] - g.start[block[b]]
    value = np.empty(start[count])
    for b in range(count):
        _alone(s, choice, inside, block[b], priced, value[start[b] : start[b + 1]])
    answers, told = np.zeros(count + 1, np.int64), np.zeros(count, np.int64)
    for b in range(1, count):
        told[b] = inside[near(g, parent[b])[0]]
        answers[b + 1] = answers[b] + start[told[b] + 1] - start[told[b]]
    answer = np.empty(answers[count], np.int64)
    for b in range(count - 1, 0, -1):
        _, at, step, far_step, _ = near(g, parent[b])
        upper = told[b]
        for i in range(start[upper + 1] - start[upper]):
            least, found = np.inf, 0
            for j in range(start[b + 1] - start[b]):
                price = value[start[b] + j]
                price += min(g.matrix[at + j * step + i * far_step], s.big)
                if price < least:
                    least, found = price, j
            value[start[upper] + i] += least
            answer[answers[b] + i] = found
    made = np.empty(count, np.int64)
    made[0] = np.argmin(value[: start[1]]) if asked == choice[block[0]] else asked
    for b in range(1, count):
        made[b] = answer[answers[b] + made[told[b]]]
    return made


@entry
def trees(
    s: Local,
    choice: Ints,
    held: Floats,
    prices: Floats,
    rounds: int,
    most: int,
    deviation: float,
    seed: int,
) -> None:
    """Makes blocks the best beside what is asked of their roots, and descends; leaves the best
    choice met.

    Args:
        s: the problem.
        choice, held: of every node, and the bytes at each time; both are changed.
        prices: seconds a byte at each time, in the choice of a block only.
        rounds: how many blocks.
        most: nodes of a block; there are as many small ones as large ones.
        deviation: see `judged`.
        seed: of the roots and what is asked of them.
    """
    np.random.seed(seed)
    n, met = len(choice), walk(s, choice, held)
    block, parent = np.empty(most, np.int64), np.empty(most, np.int64)
    inside = np.full(n, -1, np.int64)
    priced = np.zeros(len(held) + 1)
    priced[1:] = np.cumsum(prices)
    for _ in range(rounds):
        root, size = np.random.randint(n), int(np.ceil(most ** np.random.random()))
        count = _grow(s, root, size, block, parent, inside)
        asked = np.random.randint(s.graph.start[root + 1] - s.graph.start[root])
        made = _best(s, choice, block, parent, inside, count, priced, asked)
        for b in range(count):
            inside[block[b]] = -1
            if made[b] != choice[block[b]]:
                shift(s, held, block[b], choice[block[b]], made[b])
                choice[block[b]] = made[b]
        descend(s, choice, held, FITTING, 3)
        judged(s, choice, held, met, deviation)
    choice[:] = met.best
    held[:] = met.best_held

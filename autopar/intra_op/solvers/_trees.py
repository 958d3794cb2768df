"""Compiled changes of many nodes at once, exact where the nodes form a tree.

A block grows from a random node by neighbours with exactly one neighbour in the block, so that the
nodes form a tree. Dynamic programming then finds the block's best choices given all other nodes,
with memory priced per byte and time. Hamze & de Freitas, "From Fields to Trees" (UAI 2004), draw
samples in blocks that are trees; here the optimum replaces the sample. Usually the root is forced
to change first, and the block becomes optimal given that: a kick to which hundreds of nodes respond
at once.
"""

from __future__ import annotations

import numpy as np

from autopar.intra_op.reduce.flat import Floats, Ints
from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.solvers._moves import FITTING, Local, descend, judged, shift, walk
from autopar.intra_op.solvers._trws import near


@inner
def _grow(s: Local, root: int, most: int, block: Ints, parent: Ints, inside: Ints) -> int:
    """Writes the nodes of a block in order, each after its parent, with half-edges to parents.

    It grows at random: different trees connect the same nodes.

    Returns the number of nodes; `inside` holds a node's place in the block, or -1.
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
    """Writes the cost of each choice of a node, with its memory and its edges out of the block."""
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
    """Returns the best choices of a block, by a pass from leaves to root and one back.

    The root takes the requested choice, or its best one if it has that already.
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
    """Optimises random blocks given a change of their roots, and descends; leaves the best choice.

    Args:
        s: the problem.
        choice, held: choice of every node, and bytes at each time; both are changed.
        prices: seconds per byte at each time, used within a block only.
        rounds: number of blocks.
        most: maximal nodes of a block; sizes are spread evenly in logarithms.
        deviation: see `judged`.
        seed: seed of the roots and their requested choices.
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

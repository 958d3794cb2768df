"""The cheapest plan where collectives run beside kernels, by linear objectives.

Gradients are reduced beside the backward, and parameters gathered a block ahead beside forward and
backward. A step with kernels of c seconds and m seconds of collectives beside them takes

    rest + max(c + (s - 1) m, m + (s - 1) c)

where s is the slowdown of what runs side by side (`cost/overlap.py`): what remains exposed of the
collectives is bounded from below by both terms. c, m and the rest are sums over nodes and edges,
so each term is the objective of an ordinary strategy problem, but their maximum is not. For every
weight w between 0 and 1, though,

    min max(f, g) >= min (1 - w) f + w g,

and the right-hand side is an ordinary problem again: c counts 1 - w (2 - s) times and m counts
(s - 1) + w (2 - s) times. If its optimum has the same f and g, or w is 0 and f the larger, or w is
1 and g the larger, it is the optimum; otherwise w is halved towards the term that was larger, and
of the choices met the one of the least true time is taken, with the largest of the bounds. Forward
and backward have a weight each. That the collectives of the last gradients have little left to run
beside is not seen; `autopar simulate` sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.intra_op.built_problem import Built
from autopar.intra_op.problem import FORBIDDEN, Choices, Problem, Solution, evaluate

ENDS = (0.0, 1.0)  # are tried first, then the middle of what is left
ROUNDS = 5


def solve_side_by_side(built: Built, solve: Callable[[Problem], Solution]) -> Solution:
    """The choice of the least time that was found, with that time and a bound of it.

    Args:
        built: the problem; its own costs are those of a program that waits for all collectives.
        solve: solves one problem.
    """
    if not built.sides:
        return solve(built.problem)
    best: Solution | None = None
    bound, seconds = -np.inf, 0.0
    low, high = np.zeros(len(built.sides)), np.ones(len(built.sides))
    for number in range(ROUNDS):
        ends = np.full(len(low), ENDS[number]) if number < len(ENDS) else None
        weights = (low + high) / 2 if ends is None else ends
        found = solve(weighted(built, tuple(weights.tolist())))
        seconds += found.seconds
        bound = max(bound, found.bound)
        totals = np.array(built.side_by_side(found.choice))
        time = evaluate(built.problem, found).cost - built.hidden(found.choice)
        if best is None or time < best.objective:
            best = replace(found, objective=time)
        bound = min(bound, best.objective)
        if best.objective - bound <= 1e-9 * abs(best.objective):
            break
        exposed = totals[:, 1] > totals[:, 0]
        low, high = np.where(exposed, weights, low), np.where(exposed, high, weights)
    assert best is not None
    return replace(best, bound=bound, seconds=seconds)


def weighted(built: Built, weights: Sequence[float]) -> Problem:
    """The problem whose objective weighs both bounds of the exposed time.

    Args:
        built: the problem.
        weights: of each of its sides; with 0 the kernels hide all collectives, with 1 the
            collectives all kernels.
    """
    spare = 2.0 - built.slowdown
    nodes = []
    for node, name in zip(built.problem.nodes, built.names, strict=True):
        for (kernels, beside), weight in zip(built.sides, weights, strict=True):
            node = _cheaper(node, kernels.get(name), weight * spare)
            for moved in beside:
                node = _cheaper(node, moved.get(name), (1 - weight) * spare)
        nodes.append(node)
    return replace(built.problem, nodes=tuple(nodes))


def _cheaper(node: Choices, seconds: tuple[float, ...] | None, share: float) -> Choices:
    """The node without a share of some of its costs."""
    if seconds is None or not share:
        return node
    pairs = zip(node.cost, seconds, strict=True)
    cost = tuple(c if c >= FORBIDDEN else max(c - share * s, 0.0) for c, s in pairs)
    return replace(node, cost=cost)

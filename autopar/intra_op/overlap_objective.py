"""Finds the fastest plan under overlap of collectives and kernels, by linear objectives.

Gradients are reduced during the backward; parameters are gathered a block ahead, in forward and
backward. A step with c seconds of kernels, and m seconds of collectives that overlap with them,
takes

    rest + max(c + (s - 1) m, m + (s - 1) c)

where s is the slowdown while both run (`cost/overlap.py`). c, m and the rest are sums over nodes
and edges, so each term of the maximum is the objective of an ordinary strategy problem, but the
maximum is not. For every weight w between 0 and 1, though,

    min max(f, g) >= min (1 - w) f + w g,

and the right-hand side is again an ordinary problem: c counts 1 - w (2 - s) times and m counts
(s - 1) + w (2 - s) times. Its optimum is also optimal for the maximum if f and g are equal there,
or if w is 0 and f is larger, or if w is 1 and g is larger. Otherwise w moves half-way towards the
larger term. Of all choices met, the fastest is returned, with the largest of the bounds. If the
weighted objective of a choice equals its maximum, the search ends there even without a proof:
another weight cannot tell more about it. Forward and backward have a weight each. A collective
counts in m only as far as there are kernels for it: nothing runs beside the gathering of an
embedding, nor beside the reduction of its gradient. Of a run of blocks, the objective does not see
that the first gathers and the last gradients are exposed; `autopar simulate` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.intra_op.built_problem import Built
from autopar.intra_op.problem import FORBIDDEN, Choices, Problem, Solution

ENDS = (0.0, 1.0)  # tried first; then the middle of the remaining interval
ROUNDS = 5
EQUAL = 1e-9  # relative difference of seconds that are equal but for rounding


def solve_side_by_side(
    built: Built, solve: Callable[[Problem], Solution], gap: float = EQUAL
) -> Solution:
    """Returns the fastest choice found, with its time and a lower bound.

    Args:
        built: the problem, with the costs of a program that waits for all collectives.
        solve: solves one problem.
        gap: relative gap to the optimum that is accepted.
    """
    if not built.sides:
        return solve(built.problem)
    best: Solution | None = None
    bound, seconds = -np.inf, 0.0
    low, high = np.zeros(len(built.sides)), np.ones(len(built.sides))
    for number in range(ROUNDS):
        ends = np.full(len(low), ENDS[number]) if number < len(ENDS) else None
        weights = (low + high) / 2 if ends is None else ends
        solution = solve(weighted(built, tuple(weights.tolist())))
        seconds += solution.seconds
        bound = max(bound, solution.bound)
        totals = np.array(built.side_by_side(solution.choice))
        time = built.seconds(solution.choice)
        if best is None or time < best.objective:
            best = replace(solution, objective=time)
        bound = min(bound, best.objective)
        near = best.objective - bound <= max(gap, EQUAL) * abs(best.objective)
        if near or time - solution.objective <= EQUAL * abs(time):
            break
        exposed = totals[:, 1] > totals[:, 0]
        low, high = np.where(exposed, weights, low), np.where(exposed, high, weights)
    assert best is not None
    return replace(best, bound=bound, seconds=seconds)


def weighted(built: Built, weights: Sequence[float]) -> Problem:
    """Returns the problem whose objective is a weighted mean of both terms.

    Args:
        built: the problem.
        weights: one for each side; 0 means that kernels hide all collectives, 1 the reverse.
    """
    spare = 2.0 - built.slowdown
    nodes = []
    for node, name in zip(built.problem.nodes, built.names, strict=True):
        for (kernels, calls), weight in zip(built.sides, weights, strict=True):
            node = _cheaper(node, kernels.get(name), weight * spare)
            for moved in calls:
                node = _cheaper(node, moved.get(name), (1 - weight) * spare)
        nodes.append(node)
    return replace(built.problem, nodes=tuple(nodes))


def _cheaper(node: Choices, seconds: tuple[float, ...] | None, share: float) -> Choices:
    """Returns the node with a share of some of its costs removed."""
    if seconds is None or not share:
        return node
    pairs = zip(node.cost, seconds, strict=True)
    cost = tuple(c if c >= FORBIDDEN else max(c - share * s, 0.0) for c, s in pairs)
    return replace(node, cost=cost)

"""Elimination of nodes and edges, as OptCNN searches.

Jia, Lin, Qi and Aiken, "Exploring Hidden Dimensions in Parallelizing Convolutional Neural
Networks" (ICML 2018), section 5: a node between two others becomes an edge, parallel edges become
one, and the choices of the few nodes that are left are enumerated. The reductions of this package
do that and more (`autopar.intra_op.reduce`). Memory is checked only at the end.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Problem, Solution, evaluate
from autopar.intra_op.reduce import flatten, run
from autopar.intra_op.reduce.flat import Flat, Ints
from autopar.intra_op.solvers._moves import FITTING, descend, local

MOST = 100_000  # combinations that are enumerated


def solve(problem: Problem, **_: Any) -> Solution:
    """Returns the optimum without memory, or a local optimum of the problem after elimination.

    The bound is the optimum without memory, or the sum of all least costs.

    Raises:
        InfeasibleError: that choice does not fit. Another solver may find one that does.
    """
    started = time.perf_counter()
    reduced = run(flatten(replace(problem, memory_limit=None)), problem.name)
    rest = reduced.flat
    whole = math.prod(np.diff(rest.start).tolist()) <= MOST
    choice = tuple(reduced.expand(_enumerated(rest) if whole else _descended(rest)).tolist())
    judged = evaluate(problem, choice)
    if not judged.feasible:
        raise InfeasibleError(
            "the choice of elimination does not fit",
            where=f"problem {problem.name!r}",
            why=f"peak: {judged.peak:.6g} bytes, limit: {problem.memory_limit}; the method "
            "minimises time alone",
            todo="use the ilp solver, which trades time for memory",
        )
    least = [min(node.cost) for node in problem.nodes]
    sums = math.fsum([*least, *(float(edge.cost.min()) for edge in problem.edges)])
    bound = judged.cost if whole else min(sums, judged.cost)
    return Solution(choice, judged.cost, bound, "elimination", time.perf_counter() - started)


def _enumerated(rest: Flat) -> Ints:
    sizes = np.diff(rest.start).tolist()
    choices = (np.array(index, dtype=np.int64) for index in np.ndindex(*sizes))
    return min(choices, key=rest.price)


def _descended(rest: Flat) -> Ints:
    ends = zip(rest.start[:-1].tolist(), rest.start[1:].tolist(), strict=True)
    choice = np.array([int(np.argmin(rest.cost[a:b])) for a, b in ends], dtype=np.int64)
    descend(local(rest), choice, np.zeros(0), FITTING, 1000)
    return choice

"""Simulated annealing of single nodes.

Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing" (Science 220, 1983), with a
temperature that falls geometrically over the work or the time limit.
"""

from __future__ import annotations

from typing import Any

from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._sampling import Sampler, sampled
from autopar.intra_op.solvers._search import Watch

HOT, COLD = 1e-3, 1e-8  # first and last temperature, relative to the best cost


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    watch: Watch | None = None,
    seed: int = 0,
    work: float | None = None,
    **_: Any,
) -> Solution:
    """Returns the cheapest choice met, with the sum of all least costs as the bound.

    Raises:
        InfeasibleError: no choice that fits was met.
    """
    return sampled(problem, "annealing", time_limit, seed, watch, _heat, work)


def _heat(sampler: Sampler, better: bool) -> float:
    if sampler.price == float("inf"):
        return 0.0
    return float(HOT * abs(sampler.price) * (COLD / HOT) ** sampler.share())

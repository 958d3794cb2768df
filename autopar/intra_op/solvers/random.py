"""Random search: changes of random nodes to random choices, whatever they cost."""

from __future__ import annotations

from typing import Any

from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._sampling import sampled
from autopar.intra_op.solvers._search import Watch


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

    Every change that fits is made, so that the walk soon forgets where it began.

    Raises:
        InfeasibleError: no choice that fits was met.
    """
    hot = float("inf")
    return sampled(problem, "random", time_limit, seed, watch, lambda sampler, better: hot, work)

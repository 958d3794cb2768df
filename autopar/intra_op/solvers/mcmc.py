"""Markov chain Monte Carlo over strategies, as FlexFlow searches.

Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks" (MLSys 2019),
section 6: a random operator gets a random configuration; the change is priced by delta simulation
and accepted by Metropolis' rule with exp(-beta (cost' - cost)); a chain ends when it has not
improved for half of its time so far, and the next one starts anew.
"""

from __future__ import annotations

from typing import Any

from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._sampling import Sampler, sampled
from autopar.intra_op.solvers._search import Watch

HEAT = 1e-5  # 1 / beta, relative to the best cost
PATIENCE = 0.5  # share of a chain's proposals without a better choice after which it ends
LEAST = 20  # chunks of proposals in a chain


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
    return sampled(problem, "mcmc", time_limit, seed, watch, _Chains().heat, work)


class _Chains:
    """Restarts a walk that no longer improves."""

    def __init__(self) -> None:
        self.length = self.improved = 0

    def heat(self, sampler: Sampler, better: bool) -> float:
        """Returns the temperature of the next proposals in seconds."""
        self.length += 1
        self.improved = self.length if better else self.improved
        if self.length > LEAST and self.length - self.improved > PATIENCE * self.length:
            self.length = self.improved = 0
            sampler.restart()
        return HEAT * abs(sampler.price) if sampler.price < float("inf") else 0.0

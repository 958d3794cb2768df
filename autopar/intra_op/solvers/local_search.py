"""Local search from what the bounds suggest: for what is too large for integer programs."""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._search import Search, Watch, relax

KICKS = 200
PATIENCE = 40  # times so many kicks without a better choice


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    gap: float = 1e-6,
    progress: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    seed: int = 0,
) -> Solution:
    """Returns the best choice found, with the bound of the relaxation.

    Memory is priced and costs are moved about for a bound; the choices met on the way are made to
    fit, and improved by changes of single nodes and by kicks, until kicks no longer help. The same
    seed gives the same choice, unless time runs out.

    Args: as of `ilp.solve`.

    Raises:
        InfeasibleError: no choice that fits was found; there may still be one.
    """
    search = Search(problem, time_limit, gap, progress, watch, seed)
    relax(search)
    idle = 0
    while not search.done and search.best is not None and idle < PATIENCE:
        idle = 0 if search.shake(KICKS) else idle + 1
    return search.solution("local_search")

"""Local search from what the bounds suggest: for what is too large for integer programs."""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._search import Search, Watch, relax

KICKS = 500  # of single nodes, and as many of trees, between two looks at the clock
PATIENCE = 10_000  # such kicks without a better choice


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
    fit, and improved by changes of single nodes and by kicks of nodes and of trees, which may lead
    over what costs more, until kicks no longer help. The same seed gives the same choice, unless
    time runs out.

    Args: as of `ilp.solve`.

    Raises:
        InfeasibleError: no choice that fits was found; there may still be one.
    """
    search = Search(problem, time_limit, gap, progress, watch, seed)
    relax(search)
    idle, rounds, taken = 0, search.rounds(KICKS), 0.0
    while not search.proved and search.answer is not None and idle < PATIENCE:
        if search.left() <= 2 * taken:  # the last ones may have been quick
            break
        begun = search.elapsed()
        idle = 0 if search.shake(rounds) else idle + rounds
        taken = search.elapsed() - begun
    return search.solution("local_search")

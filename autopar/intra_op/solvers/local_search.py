"""Local search from what the bounds suggest: for what is too large for integer programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._narrow import narrow
from autopar.intra_op.solvers._search import Relaxation, Search, Watch, relax

KICKS = 500  # of single nodes, and as many of trees, between two looks at the clock
PATIENCE = 10_000  # such kicks without a better choice
FIRST_TRIAL, TRIALS = 0.005, 12  # how far above the bound targets are: each twice as far
NARROWING = 0.1  # share of the time left that the bounds below one target may take


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

    Memory is priced and costs are moved about for a bound, first of the whole, then of what can be
    below higher and higher targets; the choices met on the way are made to fit, and improved by
    changes of single nodes and by kicks of nodes and of trees, which may lead over what costs more,
    until kicks no longer help. The same seed gives the same choice, unless time runs out.

    Args: as of `ilp.solve`.

    Raises:
        InfeasibleError: no choice that fits was found; there may still be one.
    """
    search = Search(problem, time_limit, gap, progress, watch, seed)
    _suggested(search, relax(search))
    idle, rounds, taken = 0, search.rounds(KICKS), 0.0
    while not search.proved and search.answer is not None and idle < PATIENCE:
        if search.left() <= 2 * taken:  # the last ones may have been quick
            break
        begun = search.elapsed()
        idle = 0 if search.shake(rounds) else idle + rounds
        taken = search.elapsed() - begun
    return search.solution("local_search")


def _suggested(search: Search, relaxation: Relaxation) -> None:
    """Considers what bounds suggest below higher and higher targets, up to the best price: below
    the first ones there may be nothing, which raises the bound; below one that is little above the
    optimum few choices are left, so that those that bounds suggest are good.
    """
    for trial in range(TRIALS):
        if relaxation.dual is None or search.done:
            return
        target = min(search.bound + FIRST_TRIAL * 2**trial * search.scale(), search.price)
        last, end = target == search.price, search.elapsed() + NARROWING * search.left()
        expired = partial(_late, search, end)
        try:
            found = narrow(relaxation.dual, target, search.problem.name, relaxation.offer, expired)
            search.raise_bound(min(found.dual.bound, found.target))
            search.say(f"below {found.target:.9g}: {found.flat.size()}")
        except InfeasibleError:
            search.raise_bound(min(target, search.price))
        if last:
            return


def _late(search: Search, end: float) -> bool:
    return search.elapsed() > end

"""Local search guided by bounds, for problems that are too large for integer programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._integer.narrowing import narrow
from autopar.intra_op.solvers._search import Relaxation, Search, Watch, relax

KICKS = 500  # of single nodes, and as many of trees, between two checks of the clock
KICK_SECONDS = 1e-4  # of a kick of a node and one of a tree, on a slow core
PATIENCE = 10_000  # kicks without a better choice before it stops
FIRST_TRIAL, TRIALS = 0.005, 12  # first distance of a target above the bound, doubled each time
NARROWING = 0.1  # share of the remaining budget for the bounds below one target


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    gap: float = 1e-6,
    progress: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    seed: int = 0,
    work: float | None = None,
    **_: Any,
) -> Solution:
    """Returns the best choice found, with the bound of the relaxation.

    The bound is computed first for the whole problem, then for the choices below higher and higher
    targets. Choices met on the way are made to fit, then improved by changes of single nodes and by
    kicks of nodes and of trees, which may raise the cost for a while, until kicks no longer help.
    The same seed gives the same choice, unless time runs out.

    Args: as in `ilp.solve`.

    Raises:
        InfeasibleError: no choice that fits was found; there may still be one.
    """
    search = Search(problem, time_limit, gap, progress, watch, seed, work)
    _suggested(search, relax(search))
    idle, rounds, taken = 0, search.rounds(KICKS), 0.0
    budget = search.budget
    while not search.done and search.answer is not None and idle < PATIENCE:
        if budget.left() <= 2 * taken:  # the last rounds may have been quick
            break
        begun = budget.elapsed()
        idle = 0 if search.shake(rounds) else idle + rounds
        budget.spend(KICK_SECONDS * rounds)
        taken = budget.elapsed() - begun
    return search.solution("local_search")


def _suggested(search: Search, relaxation: Relaxation) -> None:
    """Considers choices suggested by bounds below rising targets, up to the best price.

    The first targets may have nothing below them, which raises the bound. Below a target little
    above the optimum few choices remain, so that those suggested are good.
    """
    for trial in range(TRIALS):
        if relaxation.dual is None or search.done:
            return
        target = min(search.bound + FIRST_TRIAL * 2**trial * search.scale(), search.price)
        last, expired = target == search.price, search.budget.part(NARROWING).spent
        try:
            narrowed = narrow(
                relaxation.dual, target, search.problem.name, relaxation.offer, expired
            )
            search.raise_bound(min(narrowed.dual.bound, narrowed.target))
            search.say(f"below {narrowed.target:.9g}: {narrowed.flat.size()}")
        except InfeasibleError:
            search.raise_bound(min(target, search.price))
        if last:
            return

"""A portfolio: integer programs in a separate process, and local search while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.solvers._integer.closing import close
from autopar.intra_op.solvers._large.search_large import is_large, large
from autopar.intra_op.solvers._search import Search, Watch, relax
from autopar.intra_op.solvers.ilp import explained

KICKS = 20  # between two checks of the integer program


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    gap: float = 1e-6,
    progress: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    seed: int = 0,
    start: Sequence[int] | None = None,
    work: float | None = None,
) -> Solution:
    """Returns the optimum, or the best choice found in time, with a proven bound.

    Args:
        problem: what to solve.
        time_limit: seconds after which the best choice so far is returned.
        gap: relative distance of objective and bound at which to stop.
        progress: called with a line of text at every step.
        watch: called with seconds, best price and bound whenever one of them improves.
        seed: seed of the local search.
        start: an initial choice, say of a similar problem; it need not fit.
        work: seconds of a slow core whose work the search does at most. If this ends the search,
            the same seed gives the same choice on every machine. Problems that reductions leave
            large have the work of `time_limit` by default; others are limited by the clock alone
            unless `time_limit` is infinite.

    Raises:
        InfeasibleError: no choice fits, or none is found in time.
        MissingDependencyError: an integer program is needed, but neither HiGHS nor CBC is there.
    """
    try:
        search = Search(problem, time_limit, gap, progress, watch, seed, work)
        if start is not None:
            search.begin(np.array(start, dtype=np.int64))
        if is_large(search):
            large(search)
        else:
            relaxation = relax(search)
            if not search.done:
                close(search, relaxation, lambda: _shaken(search))
    except InfeasibleError as error:
        raise explained(problem, error) from error
    return search.solution("auto")


def _shaken(search: Search) -> None:
    search.shake(search.rounds(KICKS))

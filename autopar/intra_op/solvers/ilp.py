"""Integer programming on the problem that reductions and bounds leave: exact, with a proof.

1. The reductions keep what they cannot decide (`autopar.intra_op.reduce`).
2. Memory is limited only at times at which a choice has exceeded the limit, which lets the
   reductions decide most of the rest; `_dual` bounds the remainder and finds good choices.
3. Whatever can still cost less than a target goes to HiGHS; see `_integer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.reduce import flatten, too_little_memory
from autopar.intra_op.solvers._budget import Budget
from autopar.intra_op.solvers._integer.closing import close
from autopar.intra_op.solvers._integer.integer_program import peak_program, solve_program
from autopar.intra_op.solvers._large.search_large import is_large, large
from autopar.intra_op.solvers._search import Search, Watch, relax

MOST_PAIRS = 50_000  # largest problem whose least peak is computed
SECONDS = 10.0  # of counted work


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
        seed: seed of all random choices.
        start: an initial choice, say of a similar problem; it need not fit.
        work: seconds of a slow core whose work the search does at most. If this ends the search,
            the same seed gives the same choice on every machine. Problems that reductions leave
            large have the work of `time_limit` by default; others are limited by the clock alone
            unless `time_limit` is infinite.

    Raises:
        InfeasibleError: no choice fits (the least attainable peak is in the message), or none was
            found in time.
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
                close(search, relaxation)
    except InfeasibleError as error:
        raise explained(problem, error) from error
    return search.solution("ilp")


def explained(problem: Problem, error: InfeasibleError) -> InfeasibleError:
    """Returns the error with the least attainable peak, if that can be computed quickly."""
    if problem.memory_limit is None or sum(edge.cost.size for edge in problem.edges) > MOST_PAIRS:
        return error
    whole = flatten(problem)
    budget = Budget(math.inf, SECONDS)
    status, peak = solve_program(peak_program(whole), budget, 0.0, lambda bound, choice: True)
    return too_little_memory(problem, peak) if status == "optimal" else error

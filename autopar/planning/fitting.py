"""Plans within memory: solved for, simulated, and solved again with less where they do not fit.

The problem does not see what layouts change between two operators. Where that is more than the
memory has room for, the problem is given as much less, and solved again, beginning with the choice
that it found before; the last to be tried is about the smallest plan there is.

Close to the least memory a good choice is soon found and long to be proven the best. So each solve
of a small problem has some seconds, by its size, and its plan says how far from its bound it is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InfeasibleError, ProgramError
from autopar.intra_op.built_problem import Built
from autopar.intra_op.overlap_objective import solve_side_by_side
from autopar.intra_op.polish import polish
from autopar.intra_op.problem import Problem, Solution, evaluate, frugal, too_small
from autopar.intra_op.solvers import find, solve
from autopar.stage_plan import StagePlan

EXACT = 1e-6  # the relative gap at which a choice counts as optimal
ALIKE = 1e-3  # plans of a stage so close in seconds are as good
TRIES = 4  # plans that are simulated before one fits
SLACKS = (1.02, 1.1, 1.5)  # over the least memory of all nodes, at which there may be a plan
# Seconds of a solve under a limit: of any, and more for each pair of choices of an edge, at most.
# The least is for a busy machine and a process that still has to load what the solver compiles.
LEAST_SECONDS, PAIR_SECONDS, MOST_SECONDS = 15.0, 1e-5, 60.0
LATER = 0.4  # the share of them that a solve has which begins with a choice
SOON = 0.02  # the same where the optimum is not asked for


@dataclass(frozen=True)
class Fitted:
    """A plan, with its simulated peak, and what it was made from.

    Attributes:
        plan: as it is recorded.
        counted: bytes of its peak by the problem.
        choice: of every node.
    """

    plan: StagePlan
    counted: float
    choice: tuple[int, ...]

    @property
    def peak(self) -> float:
        """Bytes of its simulated peak."""
        return self.plan.predicted.peak_bytes


Planned = Callable[[float, Fitted | None], Fitted]
"""A plan of a problem that may count so many bytes, begun with what was made before.

InfeasibleError where nothing fits.
"""


def solved(
    built: Built, solver: str, allowed: float, before: Fitted | None, gap: float = EXACT
) -> tuple[tuple[int, ...], Solution]:
    """The polished choice and what the solver says of it.

    Args:
        built: the problem.
        solver: the name of what solves it.
        allowed: bytes that the problem may count.
        before: a plan to begin with.
        gap: from the optimum that is small enough.

    Raises:
        InfeasibleError: nothing fits, or nothing was found in time.
    """
    problem = replace(built.problem, memory_limit=max(allowed, 0.0))
    limited = replace(built, problem=problem)
    start, seconds = before.choice if before else None, _seconds(problem)

    def once(problem: Problem) -> Solution:
        nonlocal start
        share = LATER if gap <= EXACT else SOON
        limit = seconds if start is None else share * seconds
        said = {"start": start, "time_limit": limit, "gap": gap}
        found = solve(problem, solver=solver, **_understood(solver, said))
        start = found.choice
        return found

    solution = solve_side_by_side(limited, once)
    # The judge is not the party: a plan that breaks the limit must never be used.
    judged = evaluate(problem, solution)
    if not judged.feasible:
        raise ProgramError(
            f"the solver {solver} returned a plan that is not feasible",
            why=f"peak {judged.peak:.4g} bytes, limit {problem.memory_limit}",
        )
    return polish(limited, solution.choice), solution


def fitting(planned: Planned, problem: Problem, limit: float, searches: bool) -> StagePlan:
    """The first plan whose simulated step fits.

    Args:
        planned: makes a plan and simulates it.
        problem: what is solved.
        limit: bytes a device.
        searches: whether the solver finds something smaller where it has less memory.

    Raises:
        InfeasibleError: no plan was found that fits; says how much is missing.
    """
    _, held = frugal(problem.nodes)
    allowed, least = max(limit, 0.0), sum(held.values())
    made: Fitted | None = None
    for _ in range(TRIES):
        if allowed < least:
            break
        try:
            made = planned(allowed, made)
        except InfeasibleError:
            if not searches:
                raise
            break
        if made.peak <= limit:
            return made.plan
        allowed = min(allowed, made.counted) - (made.peak - limit)
    smallest = _smallest(planned, least, made)
    if smallest.peak <= limit:
        return smallest.plan
    none = "no plan fits" if limit < least else "no plan was found that fits"  # proven, or not
    raise too_small(none, max(limit, 0.0), smallest.peak, held)


def _smallest(planned: Planned, least: float, before: Fitted | None) -> Fitted:
    """A plan of little more than the least memory, or what was made before if that is smaller.

    Raises:
        InfeasibleError: pins leave none at all.
    """
    for slack in SLACKS:
        try:
            made = planned(slack * least, before)
        except InfeasibleError:
            continue
        return min(made, before or made, key=lambda each: each.peak)
    return before or planned(math.inf, None)


def _seconds(problem: Problem) -> float:
    """How long a solver may look."""
    if problem.memory_limit is None or math.isinf(problem.memory_limit):
        return MOST_SECONDS
    pairs = sum(edge.cost.size for edge in problem.edges)
    return min(LEAST_SECONDS + PAIR_SECONDS * pairs, MOST_SECONDS)


def _understood(solver: str, said: dict[str, Any]) -> dict[str, Any]:
    """The options that a solver takes."""
    known = inspect.signature(find(solver)).parameters
    return {name: value for name, value in said.items() if name in known and value is not None}

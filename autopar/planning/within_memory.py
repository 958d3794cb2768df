"""Finds a plan within memory: solves, simulates, and solves again if the plan does not fit.

The problem does not count the buffers of resharding between two operators. If a plan's simulated
peak exceeds the limit, the problem gets that much less memory and is solved again, starting from
the previous choice. The last attempt is close to the smallest plan there is.

Near the least memory, a good choice is found soon but takes long to prove optimal. Therefore the
work of every solve is limited, and a plan records its gap to the bound. Work is counted, not timed:
the same input gives the same plan on every machine, however busy.
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
ALIKE = 1e-3  # relative difference in seconds at which plans of a stage count as equal
TRIES = 4  # plans to simulate until one fits
SLACKS = (1.02, 1.1, 1.5)  # limits to try, in units of the least memory of all nodes
# Work of a solve in seconds of a slow core: a base, plus a part for each pair of choices of an
# edge, up to a maximum.
LEAST_SECONDS, PAIR_SECONDS, MOST_SECONDS = 3.0, 1e-5, 20.0
LATER = 0.4  # fraction of the work for a solve that starts from a choice
SOON = 0.1  # the same, if a gap to the optimum is accepted


@dataclass(frozen=True)
class Fitted:
    """A plan with its peak, simulated or not, and the choice it was made from.

    Attributes:
        plan: the plan.
        counted: its peak in bytes by the problem.
        choice: the strategy of every node.
    """

    plan: StagePlan
    counted: float
    choice: tuple[int, ...]

    @property
    def peak(self) -> float:
        """Simulated peak in bytes."""
        return self.plan.predicted.peak_bytes


Planned = Callable[[float, Fitted | None], Fitted]
"""Plans within a number of bytes by the problem, starting from an earlier plan.

Raises InfeasibleError if nothing fits.
"""


def solved(
    built: Built, solver: str, allowed: float, before: Fitted | None, gap: float = EXACT
) -> tuple[tuple[int, ...], Solution]:
    """Solves a problem and polishes the choice.

    Args:
        built: the problem.
        solver: name of the solver.
        allowed: bytes that the problem may count.
        before: a plan to start from.
        gap: relative gap to the optimum that is accepted.

    Returns:
        The polished choice, and the solver's solution.

    Raises:
        InfeasibleError: nothing fits, or nothing was found in time.
    """
    problem = replace(built.problem, memory_limit=max(allowed, 0.0))
    limited = replace(built, problem=problem)
    start, most = before.choice if before else None, _work(problem)

    def once(problem: Problem) -> Solution:
        nonlocal start
        share = LATER if gap <= EXACT else SOON
        work = most if start is None else share * most
        solution = solve_by_work(problem, solver, work, start=start, gap=gap)
        start = solution.choice
        return solution

    solution = solve_side_by_side(limited, once, gap)
    # `evaluate` shares no code with the solvers; a plan that breaks the limit is never used.
    judged = evaluate(problem, solution)
    if not judged.feasible:
        raise ProgramError(
            f"the solver {solver} returned an infeasible plan",
            why=f"peak {judged.peak:.4g} bytes, limit {problem.memory_limit}",
        )
    return polish(limited, solution.choice), solution


def fitting(planned: Planned, problem: Problem, limit: float, searches: bool) -> StagePlan:
    """Returns the first plan whose simulated step fits in memory.

    Args:
        planned: makes a plan and simulates it.
        problem: the problem to solve.
        limit: bytes of a device.
        searches: whether the solver can find a smaller plan within less memory.

    Raises:
        InfeasibleError: no plan fits; says how much memory is missing.
    """
    _, held = frugal(problem.nodes)
    allowed, least = max(limit, 0.0), sum(held.values())
    plan: Fitted | None = None
    halved = False
    for _ in range(TRIES):
        if allowed < least:
            if plan is None or halved:
                break
            # Other choices have smaller buffers: one more plan, halfway to the least memory.
            allowed, halved = (least + plan.counted) / 2, True
        try:
            plan = planned(allowed, plan)
        except InfeasibleError:
            if not searches:
                raise
            break
        if plan.peak <= limit:
            return plan.plan
        allowed = min(allowed, plan.counted) - (plan.peak - limit)
    smallest = _smallest(planned, least, plan, limit)
    if smallest.peak <= limit:
        return smallest.plan
    none = "no plan fits" if limit < least else "no plan was found that fits"  # proven, or not
    raise too_small(none, max(limit, 0.0), smallest.peak, held)


def least_bytes(problem: Problem) -> float:
    """Returns the least memory of all nodes together at the time at which it is largest."""
    _, held = frugal(problem.nodes)
    return sum(held.values())


def _smallest(planned: Planned, least: float, before: Fitted | None, limit: float) -> Fitted:
    """Returns a plan of little more than the least memory, or an earlier plan if that is smaller.

    Less memory by the problem may need larger buffers of resharding, so that further limits are
    tried until a plan fits; unless the least memory exceeds the limit already.

    Raises:
        InfeasibleError: the pins admit no plan at all.
    """
    smallest = before
    for slack in SLACKS:
        try:
            plan = planned(slack * least, before)
        except InfeasibleError:
            continue
        smallest = min(plan, smallest or plan, key=lambda each: each.peak)
        if smallest.peak <= limit or limit < least:
            break
    return smallest or planned(math.inf, None)


def solve_by_work(problem: Problem, solver: str, work: float, **options: Any) -> Solution:
    """Solves a problem within seconds of counted work, or of the clock if the solver counts none.

    Args:
        problem: what to solve.
        solver: name of the solver.
        work: seconds of a slow core.
        **options: further options, used as far as the solver takes them and they are not None.

    Raises:
        InfeasibleError: nothing fits, or nothing was found within the limit.
    """
    known = inspect.signature(find(solver)).parameters
    options |= {"work": work, "time_limit": math.inf if "work" in known else work}
    taken = {name: each for name, each in options.items() if name in known and each is not None}
    return solve(problem, solver=solver, **taken)


def _work(problem: Problem) -> float:
    """Returns the work of a solve in seconds."""
    pairs = sum(edge.cost.size for edge in problem.edges)
    return min(LEAST_SECONDS + PAIR_SECONDS * pairs, MOST_SECONDS)

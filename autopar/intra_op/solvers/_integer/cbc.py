"""The integer program in PuLP, for CBC where HiGHS is not installed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pulp

from autopar.errors import MissingDependencyError
from autopar.intra_op.reduce.flat import Ints
from autopar.intra_op.solvers._budget import Budget
from autopar.intra_op.solvers._integer.integer_program import Program

NODE_SECONDS = 4e-5  # of a node of the search tree, per column, on a slow core


def solve_program(
    stated: Program, budget: Budget, gap: float, report: Callable[[float, Ints | None], bool]
) -> tuple[str, float]:
    """Solves a program as `integer_program.solve_program` does.

    PuLP does not return CBC's bound, so a bound is known only if the program was solved to the end.

    Raises:
        MissingDependencyError: PuLP finds no CBC either.
    """
    arrays, lp = stated.arrays, pulp.LpProblem("strategies", pulp.LpMinimize)
    binaries = int(arrays["binaries"])
    variables = [
        lp.add_variable(f"x{k}", 0, 1, pulp.LpBinary if k < binaries else pulp.LpContinuous)
        for k in range(len(arrays["cost"]))
    ]
    terms = zip(variables, arrays["cost"].tolist(), strict=True)
    lp.setObjective(pulp.LpAffineExpression([(x, cost) for x, cost in terms if cost]))
    start, index, value = (arrays[name].tolist() for name in ("start", "index", "value"))
    for row, (lower, upper) in enumerate(zip(arrays["lower"], arrays["upper"], strict=True)):
        inside = range(start[row], start[row + 1])
        expression = pulp.LpAffineExpression([(variables[index[k]], value[k]) for k in inside])
        sense = pulp.LpConstraintEQ if lower == upper else pulp.LpConstraintLE
        lp += pulp.LpConstraint(expression, sense, rhs=float(upper))
    lp.solve(_cbc(budget, gap / stated.unit, len(variables)))
    if lp.status == pulp.LpStatusInfeasible:
        return "infeasible", np.inf
    proved = lp.sol_status == pulp.LpSolutionOptimal
    if not proved and budget.work < math.inf:
        budget.spend(budget.unspent())  # its nodes were the rest of the work
    if lp.status != pulp.LpStatusOptimal:
        return "stopped", -np.inf
    objective = float(pulp.value(lp.objective) or 0.0)
    lower = stated.offset + stated.unit * objective - gap if proved else -np.inf
    taken = [k for k in range(binaries) if (variables[k].varValue or 0.0) > 0.5]
    report(lower, np.array(taken, dtype=np.int64) - stated.flat.start[:-1])
    return "optimal" if proved else "stopped", lower


def _cbc(budget: Budget, gap: float, columns: int) -> Any:
    limits = {
        "timeLimit": None if budget.time_limit == math.inf else budget.left(),
        "maxNodes": None
        if budget.work == math.inf
        else int(budget.unspent() / (NODE_SECONDS * columns)) + 1,
    }
    for kind in (pulp.COIN_CMD, pulp.PULP_CBC_CMD):  # the system's, or PuLP's own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            solver = kind(msg=False, gapAbs=gap, gapRel=0.0, **limits)
        if solver.available():
            return solver
    raise MissingDependencyError(
        "no solver of integer programs is installed",
        why="neither highspy nor CBC was found",
        todo="pip install highspy",
    )

"""The integer program with named variables, in PuLP: readable, and a check of the array version.

The program is that of `_integer`, stated without its arrays and its reductions:

    minimise    the cost of every choice that is taken, and of every pair of choices at an edge
    subject to  one_choice(v):        node v takes exactly one of its choices
                follows(u, v, i):     the pairs of edge u-v that contain choice i of u are taken as
                                      often as i is
                leads(u, v, j):       the same for choice j of v
                memory(t):            the bytes of the choices that are taken and live at time t are
                                      at most the limit

`choose` is a binary variable for every choice that is allowed, `pair` one between 0 and 1 for every
such pair. Costs are written in ten-thousandths of the largest cost and memory in thousandths of the
limit, since solvers compare with absolute tolerances.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autopar.errors import InfeasibleError, MissingDependencyError, ProblemError
from autopar.intra_op.problem import FORBIDDEN, Problem, Solution, evaluate
from autopar.intra_op.reduce import critical_times

SOLVERS = {
    "CBC": ("COIN_CMD", "PULP_CBC_CMD"),
    "HiGHS": ("HiGHS", "HiGHS_CMD"),
    "GUROBI": ("GUROBI", "GUROBI_CMD"),
    "SCIP": ("SCIP_PY", "SCIP_CMD"),
    "CPLEX": ("CPLEX_PY", "CPLEX_CMD"),
}
MOST_PAIRS = 200_000  # more take minutes to state


def solve(
    problem: Problem,
    *,
    backend: str = "",
    time_limit: float = 60.0,
    gap: float = 1e-9,
    **_: Any,
) -> Solution:
    """Returns the optimum that a solver of PuLP proves.

    Args:
        problem: what to solve.
        backend: "CBC", "HiGHS", "GUROBI", "SCIP" or "CPLEX"; empty for the first one installed.
        time_limit: seconds for the solver, without those for stating the program.
        gap: relative distance of objective and bound at which it may stop.

    Raises:
        InfeasibleError: no choice fits, or the solver finds none in time.
        MissingDependencyError: the solver is not installed.
        ProblemError: there is no such solver, or the problem is too large for PuLP.
    """
    import pulp

    started = time.perf_counter()
    program = PulpProgram(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program.lp.solve(_solver(backend, time_limit, gap))
    status = program.lp.status
    if status == pulp.LpStatusInfeasible or program.lp.sol_status not in (
        pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible,
    ):  # fmt: skip
        proved = status == pulp.LpStatusInfeasible
        raise InfeasibleError(
            "no choice fits" if proved else "PuLP's solver found no choice",
            where=f"problem {problem.name!r}",
            why="the integer program has no solution" if proved else f"it ended: {status}",
            todo="allow more memory" if proved else "raise the time limit",
        )
    choice = program.choice()
    judged = evaluate(problem, choice)
    bound = judged.cost if program.lp.sol_status == pulp.LpSolutionOptimal else -math.inf
    return Solution(choice, judged.cost, bound, "pulp", time.perf_counter() - started)


def written(problem: Problem) -> str:
    """Returns the program in the LP format of CPLEX, which every solver reads."""
    program = PulpProgram(problem)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "problem.lp"
        program.lp.writeLP(str(path))
        return path.read_text(encoding="utf-8")


class PulpProgram:
    """A problem as a program of PuLP.

    Attributes:
        lp: the program.
        choose: per node, its allowed choices with their binary variables.
    """

    def __init__(self, problem: Problem) -> None:
        import pulp

        pairs = sum(edge.cost.size for edge in problem.edges)
        if pairs > MOST_PAIRS:
            raise ProblemError(
                "the problem is too large for PuLP",
                where=f"problem {problem.name!r}",
                why=f"{pairs} pairs of choices, of at most {MOST_PAIRS}",
                todo="use the ilp solver, which reduces it first",
            )
        self.problem, self.lp = problem, pulp.LpProblem("strategies", pulp.LpMinimize)
        self.names = _names([node.name for node in problem.nodes])
        self.choose = [self._choices(v) for v in range(len(problem.nodes))]
        costs = [
            (x, node.cost[i])
            for node, taken in zip(problem.nodes, self.choose, strict=True)
            for i, x in taken.items()
        ]
        for number, edge in enumerate(problem.edges):
            costs += self._edge(number, edge.a, edge.b)
        unit = max((abs(cost) for _, cost in costs), default=0.0) / 1e4 or 1.0
        self.lp.setObjective(pulp.LpAffineExpression([(x, c / unit) for x, c in costs if c]))
        self._memory()

    def _choices(self, v: int) -> dict[int, Any]:
        """One choice for every node: exactly one of its variables is 1."""
        import pulp

        node, name = self.problem.nodes[v], self.names[v]
        taken = {
            i: self.lp.add_variable(f"choose_{name}_{i}", 0, 1, pulp.LpBinary)
            for i, cost in enumerate(node.cost)
            if cost < FORBIDDEN
        }
        self.lp += pulp.lpSum(taken.values()) == 1, f"one_choice_{name}"
        return taken

    def _edge(self, number: int, a: int, b: int) -> list[tuple[Any, float]]:
        """A pair is taken where both of its choices are; returns the pairs with their costs."""
        import pulp

        cost, name = self.problem.edges[number].cost, f"{self.names[a]}_{self.names[b]}_{number}"
        pair = {
            (i, j): self.lp.add_variable(f"pair_{name}_{i}_{j}", 0, 1)
            for i in self.choose[a]
            for j in self.choose[b]
            if cost[i, j] < FORBIDDEN
        }
        for i, x in self.choose[a].items():
            chosen = [pair[i, j] for j in self.choose[b] if (i, j) in pair]
            self.lp += pulp.lpSum(chosen) == x, f"follows_{name}_{i}"
        for j, x in self.choose[b].items():
            chosen = [pair[i, j] for i in self.choose[a] if (i, j) in pair]
            self.lp += pulp.lpSum(chosen) == x, f"leads_{name}_{j}"
        return [(y, float(cost[i, j])) for (i, j), y in pair.items()]

    def _memory(self) -> None:
        """Adds the memory limit at each time at which the set of live nodes is maximal."""
        import pulp

        limit = self.problem.memory_limit
        if limit is None:
            return
        unit = limit / 1e3 or 1.0
        for t in critical_times(self.problem).tolist():
            held: defaultdict[tuple[int, int], float] = defaultdict(float)
            for v, node in enumerate(self.problem.nodes):
                for (low, high), nbytes in node.held:
                    for i in self.choose[v] if low <= t < high else ():
                        held[v, i] += nbytes[i]
            live = [(self.choose[v][i], nbytes / unit) for (v, i), nbytes in held.items()]
            self.lp += pulp.LpAffineExpression(live) <= limit / unit, f"memory_{t}"

    def choice(self) -> tuple[int, ...]:
        """Returns the choice of every node in the solution."""
        return tuple(
            max(taken, key=lambda i: float(taken[i].varValue or 0.0)) for taken in self.choose
        )


def _names(names: list[str]) -> list[str]:
    """Returns distinct names that LP files allow, as close as possible to those of the nodes."""
    clean = [re.sub(r"[^A-Za-z0-9_]", "_", name)[:80] for name in names]
    numbers: defaultdict[str, int] = defaultdict(int)
    for name in clean:
        numbers[name] += 1
    return [n if numbers[n] == 1 else f"{n}_node{v}" for v, n in enumerate(clean)]


def _solver(backend: str, seconds: float, gap: float) -> Any:
    """Returns PuLP's solver of that name, or the first one that is installed."""
    import pulp

    known = {name.lower(): kinds for name, kinds in SOLVERS.items()}
    if backend and backend.lower() not in known:
        raise ProblemError(
            f"PuLP's solver {backend!r} is not known here",
            why="the solvers are " + ", ".join(SOLVERS),
            todo="name one of these, as in pulp:HiGHS",
        )
    for kind in known[backend.lower()] if backend else sum(known.values(), ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind in pulp.listSolvers(onlyAvailable=True):
                return pulp.getSolver(kind, msg=False, timeLimit=seconds, gapRel=gap)
    raise MissingDependencyError(
        f"PuLP finds no solver {backend}".rstrip(),
        why=f"it looked for {', '.join(known[backend.lower()]) if backend else 'all it knows'}",
        todo="install it, or use pulp:HiGHS (pip install highspy)",
    )

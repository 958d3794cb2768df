"""The optimum by integer linear programming, with its proof.

The program is that of Alpa (Zheng et al., OSDI 2022, section 4.2) with its products linearised in
the strong form, whose relaxation is the local polytope. Over nodes v, edges (u, v), critical times
t, with costs c, C and memories m:

    minimise    sum_v c_v . s_v  +  sum_uv <C_uv, e_uv>
    subject to  s_v in {0, 1}^k_v,      sum_i s_v,i = 1            one choice for every node
                e_uv >= 0,              sum_j e_uv,ij = s_u,i      a row of an edge is its node's
                                        sum_i e_uv,ij = s_v,j
                sum_{v live at t} m_v . s_v <= limit               for every t

with e_uv,ij left out where it is forbidden. It is seldom solved as it stands:

1. Without memory, the reductions alone solve most problems; if that optimum fits, that is all.
2. Otherwise the reductions keep what memory touches; a dual bound and a good choice rule out most
   of the rest, which is reduced again.
3. What is left goes to HiGHS (or CBC) through PuLP, in units such that tolerances do not matter. A
   choice that exceeds the limit by less than the tolerance is cut off by a cover inequality.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pulp

from autopar.errors import InfeasibleError, MissingDependencyError
from autopar.intra_op.problem import FORBIDDEN, Edge, Problem, Solution
from autopar.intra_op.reduce import reduce, too_little_memory
from autopar.intra_op.solvers._dual import tighten
from autopar.intra_op.solvers.greedy import Tables

MOST_PAIRS = 400_000  # PuLP takes some ten seconds to state a program of this size

Found = tuple[tuple[int, ...], float]  # a choice and a lower bound in seconds


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    gap: float = 1e-6,
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """Returns the optimum, or the best choice found in time, with a proven bound.

    Args:
        problem: what to solve.
        time_limit: seconds after which the best choice so far is returned.
        gap: relative distance of objective and bound at which to stop.
        progress: called with a line of text at every step.

    Raises:
        InfeasibleError: no choice fits (the least attainable peak is in the message), or none was
            found in time.
        MissingDependencyError: an integer program is needed, and neither HiGHS nor CBC is there.
    """
    search = _Search(time_limit, gap, progress or (lambda text: None))
    tables = Tables(problem)
    choice, bound = search.run(replace(problem, memory_limit=None))
    if not tables.fits(choice):
        search.say("the optimum without memory does not fit")
        try:
            choice, tighter = search.run(problem)
        except InfeasibleError as error:
            raise search.explain(problem, error) from error
        bound = max(bound, tighter)
    price = tables.price(choice)
    return Solution(choice, price, min(bound, price), "ilp", search.elapsed())


class _Search:
    """The options of one call, and its clock."""

    def __init__(self, time_limit: float, gap: float, progress: Callable[[str], None]) -> None:
        self.started = time.perf_counter()
        self.time_limit, self.gap, self.progress = time_limit, gap, progress

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def left(self) -> float:
        return max(self.time_limit - self.elapsed(), 0.0)

    def say(self, text: str) -> None:
        self.progress(f"{self.elapsed():7.2f} s  {text}")

    def run(self, problem: Problem) -> Found:
        reduction = reduce(problem)
        core = reduction.problem
        self.say(f"reduced {_size(problem)} to {_size(core)}")
        choice, bound = _only_choice(core) or self.tightened(core)
        return reduction.expand(choice), bound

    def tightened(self, core: Problem) -> Found:
        half = self.elapsed() + 0.5 * self.left()
        result = tighten(core, self.gap, lambda: self.elapsed() > half)
        self.say(f"bounds {result.bound:.9g} to {result.price:.9g} s")
        if result.choice is not None and result.price - result.bound <= self.gap * abs(
            result.price
        ):
            return result.choice, result.bound
        reduction = reduce(result.problem)
        rest = reduction.problem
        self.say(f"bounds leave {_size(rest)}")
        known = None if result.choice is None else result.price
        choice, bound = _only_choice(rest) or self.branch(rest, known, result.bound)
        # The known choice may have been dropped as no better than another one: compare prices.
        tables = Tables(core)
        found = [] if choice is None else [reduction.expand(choice)]
        found += [] if result.choice is None else [result.choice]
        if not found:
            raise InfeasibleError(
                "no choice that fits was found in time",
                where=f"problem {core.name!r}",
                why=f"{self.time_limit:g} s were not enough; whether there is one is not known",
                todo="raise the solver's time limit, or allow more memory",
            )
        best = min(found, key=tables.price)
        return best, max(bound, result.bound)

    def branch(
        self, core: Problem, known: float | None, bound: float
    ) -> tuple[tuple[int, ...] | None, float]:
        """Returns a choice for the core, or None if there was no time for one, and a bound."""
        if _pairs(core) > MOST_PAIRS:
            self.say(f"too large for an integer program: {_pairs(core)} pairs")
            return None, bound
        program = _Program(core, math.inf if known is None else known - bound)
        tables = Tables(core)
        while True:
            self.say(f"integer program of {program.lp.numVariables()} variables")
            status, lower = program.run(self.left(), self.gap)
            if status == "infeasible":
                if known is not None:  # which has then been proved best, up to rounding
                    return None, known
                raise InfeasibleError("no choice fits", where=f"problem {core.name!r}")
            bound = max(bound, lower)
            if status == "nothing":
                return None, bound
            choice = program.choice()
            if tables.fits(choice):
                return choice, bound
            program.cut(choice, tables)

    def explain(self, problem: Problem, error: InfeasibleError) -> InfeasibleError:
        """Returns the error with the least attainable peak, if that can be found."""
        if self.left() == 0 or _pairs(problem) > MOST_PAIRS // 4:
            return error
        program = _Program(problem, math.inf, least_peak=True)
        status, peak = program.run(max(self.left(), 1.0), 1e-6)
        return too_little_memory(problem, peak) if status == "optimal" else error


class _Program:
    """The integer program of a problem, as PuLP states it.

    Costs are counted from the least of every node and edge, in units in which what can still
    matter spans 10^4; memory is counted from the least of every node, in units in which what is
    left of the limit is 10^3. So tolerances of 1e-6 are one part in 10^9 or less.
    """

    def __init__(self, problem: Problem, span: float, least_peak: bool = False) -> None:
        self.tables = tables = Tables(problem)
        self.lp = pulp.LpProblem("strategies", pulp.LpMinimize)
        self.chosen = [
            [self.lp.add_variable(f"s{v}_{i}", cat=pulp.LpBinary) for i in range(len(cost))]
            for v, cost in enumerate(tables.cost)
        ]
        self.offset = tables.bound()
        nodes = [cost - cost.min() for cost in tables.cost]
        edges = [np.where(e.cost < FORBIDDEN, e.cost, np.inf) for e in problem.edges]
        edges = [cost - cost.min() for cost in edges]
        largest = max([float(c[np.isfinite(c)].max(initial=0.0)) for c in (*nodes, *edges)] + [0.0])
        self.unit = min(span, largest) / 1e4 if 0 < min(span, largest) < math.inf else 1.0
        self.terms: list[tuple[Any, float]] = []
        for variables, costs in zip(self.chosen, nodes, strict=True):
            self.add(variables, 1.0)
            self.terms += self._priced(variables, costs)
        for number, (edge, costs) in enumerate(zip(problem.edges, edges, strict=True)):
            self._link(number, edge, costs)
        self.peak_unit = 0.0
        if least_peak:
            self._minimise_peak()
        else:
            self.lp.setObjective(pulp.LpAffineExpression(self.terms))
            self._limit_memory()

    def add(self, variables: Sequence[Any], total: float, minus: Any = None) -> None:
        """Adds the row sum(variables) - minus = total."""
        row = [(variable, 1.0) for variable in variables]
        row += [] if minus is None else [(minus, -1.0)]
        expression = pulp.LpAffineExpression(row)
        self.lp += pulp.LpConstraint(expression, pulp.LpConstraintEQ, rhs=total)

    def _priced(self, variables: Sequence[Any], costs: Any) -> list[tuple[Any, float]]:
        terms = []
        for variable, value in zip(variables, (costs / self.unit).tolist(), strict=True):
            if value == math.inf:
                variable.upBound = 0
            elif value > 0:
                terms.append((variable, value))
        return terms

    def _link(self, number: int, edge: Edge, costs: Any) -> None:
        allowed = np.argwhere(np.isfinite(costs)).tolist()
        pair = {(i, j): self.lp.add_variable(f"e{number}_{i}_{j}", 0) for i, j in allowed}
        self.terms += self._priced(list(pair.values()), costs[np.isfinite(costs)])
        rows: list[list[Any]] = [[] for _ in self.chosen[edge.a]]
        columns: list[list[Any]] = [[] for _ in self.chosen[edge.b]]
        for (i, j), variable in pair.items():
            rows[i].append(variable)
            columns[j].append(variable)
        for line, choice in zip(
            rows + columns, self.chosen[edge.a] + self.chosen[edge.b], strict=True
        ):
            self.add(line, 0.0, minus=choice)

    def _held(self, position: int) -> tuple[list[tuple[Any, float]], float, float]:
        """Terms, least and most bytes at a critical time, each node counted from its least."""
        terms, least, most = [], 0.0, 0.0
        for v, (low, high) in enumerate(self.tables.spans):
            if low <= position < high:
                memory = self.tables.memory[v]
                least, most = least + float(memory.min()), most + float(memory.max())
                extra = (memory - memory.min()).tolist()
                terms += [(x, m) for x, m in zip(self.chosen[v], extra, strict=True) if m > 0]
        return terms, least, most

    def _limit_memory(self) -> None:
        limit = self.tables.limit
        for position in range(len(self.tables.times) if limit < math.inf else 0):
            terms, least, most = self._held(position)
            if most <= limit:
                continue
            room = max(limit - least, 0.0)  # less than zero only by rounding: see reduce
            self._below(terms, room / 1e3 if room else 1.0, room)

    def _below(self, terms: list[tuple[Any, float]], unit: float, room: float) -> None:
        expression = pulp.LpAffineExpression([(x, m / unit) for x, m in terms])
        self.lp += pulp.LpConstraint(expression, pulp.LpConstraintLE, rhs=room / unit)

    def _minimise_peak(self) -> None:
        held = [self._held(position) for position in range(len(self.tables.times))]
        self.peak_unit = max((most for _, _, most in held), default=0.0) / 1e4 or 1.0
        peak = self.lp.add_variable("peak", 0)
        self.lp.setObjective(pulp.LpAffineExpression([(peak, 1.0)]))
        for terms, least, _ in held:
            self._below([*terms, (peak, -self.peak_unit)], self.peak_unit, -least)

    def run(self, time_limit: float, gap: float) -> tuple[str, float]:
        """Returns "optimal", "feasible" (out of time), "infeasible" or "nothing", and the bound in
        seconds (in bytes if the peak is minimised).
        """
        highs = pulp.HiGHS(msg=False, gapRel=gap, gapAbs=0.0, timeLimit=time_limit)
        solver = highs if highs.available() else _cbc(gap, time_limit)
        self.lp.solve(solver)
        if self.lp.status == pulp.LpStatusInfeasible:
            return "infeasible", math.inf
        if self.lp.status != pulp.LpStatusOptimal:
            return "nothing", -math.inf
        proved = self.lp.sol_status == pulp.LpSolutionOptimal
        value = float(pulp.value(self.lp.objective) or 0.0)
        if solver is highs:
            lower = float(self.lp.solverModel.getInfo().mip_dual_bound)
        else:  # PuLP does not pass on CBC's bound; nothing in the program is negative
            lower = value - gap * abs(value) if proved else 0.0
        unit, offset = (self.peak_unit, 0.0) if self.peak_unit else (self.unit, self.offset)
        return "optimal" if proved else "feasible", offset + unit * lower

    def choice(self) -> tuple[int, ...]:
        """Returns the choice that the program has found."""
        return tuple(
            int(np.argmax([variable.varValue or 0.0 for variable in variables]))
            for variables in self.chosen
        )

    def cut(self, choice: Sequence[int], tables: Tables) -> None:
        """Adds the cover inequality of the fullest time: of the nodes live there, at least one must
        choose something with less memory.
        """
        position = int(np.argmax(tables.held(choice)))
        cover = [v for v, (low, high) in enumerate(tables.spans) if low <= position < high]
        terms = [
            (variable, 1.0)
            for v in cover
            for variable, memory in zip(self.chosen[v], tables.memory[v], strict=True)
            if memory >= tables.memory[v][choice[v]]
        ]
        expression = pulp.LpAffineExpression(terms)
        self.lp += pulp.LpConstraint(expression, pulp.LpConstraintLE, rhs=len(cover) - 1)


def _cbc(gap: float, time_limit: float) -> Any:
    for kind in (pulp.COIN_CMD, pulp.PULP_CBC_CMD):  # the system's, or PuLP's own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            solver = kind(msg=False, gapRel=gap, timeLimit=time_limit)
        if solver.available():
            return solver
    raise MissingDependencyError(
        "there is no solver of integer programs",
        why="PuLP finds neither HiGHS nor CBC",
        todo="pip install highspy",
    )


def _only_choice(problem: Problem) -> Found | None:
    if any(len(node.cost) > 1 for node in problem.nodes):
        return None
    choice = (0,) * len(problem.nodes)
    return choice, Tables(problem).price(choice)


def _pairs(problem: Problem) -> int:
    return sum(int((edge.cost < FORBIDDEN).sum()) for edge in problem.edges)


def _size(problem: Problem) -> str:
    choices = sum(len(node.cost) for node in problem.nodes)
    return f"{len(problem.nodes)} nodes, {choices} choices, {_pairs(problem)} pairs"

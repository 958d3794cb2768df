"""The exact placement of small graphs, as an integer program in PuLP.

minimise    end
subject to  sum_d on(v, d) = 1                                      one device for every task
            end >= start(v) + sum_d seconds(v, d) on(v, d)
            start(w) >= start(v) + its seconds + delay(v, w)        for every transfer v-w
            delay(v, w) >= seconds of the transfer from d to e, if v is on d and w on e
            start(w) >= end of v, or start(v) >= end of w           if both are on one device
            sum_v memory(v) on(v, d) <= capacity(d)
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

from autopar.errors import InfeasibleError, ProblemError
from autopar.inter_op.placement.placement_problem import (
    Placed,
    PlacementProblem,
    simulate_placement,
)

MOST = 16  # tasks


def place(problem: PlacementProblem, *, time_limit: float = 60.0, **_: Any) -> Placed:
    """Returns the fastest placement, proven unless time runs out.

    Raises:
        InfeasibleError: none fits, or none is found in time.
        ProblemError: there are more than 16 tasks.
    """
    import pulp

    if len(problem.tasks) > MOST:
        raise ProblemError(
            "the graph is too large for an exact placement",
            where=f"placement problem {problem.name!r}",
            why=f"{len(problem.tasks)} tasks, at most {MOST}",
            todo="group its tasks, or use metropolis",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stated = _PulpProgram(problem)
        stated.lp.solve(pulp.HiGHS(msg=False, timeLimit=time_limit, gapRel=1e-9))
    if stated.lp.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise InfeasibleError(
            "no placement fits",
            where=f"placement problem {problem.name!r}",
            why=f"the integer program ended: {pulp.LpStatus[stated.lp.status]}",
            todo="use more devices, larger ones, or a longer time limit",
        )
    devices = [max(on, key=lambda d: float(on[d].varValue or 0.0)) for on in stated.on]
    return simulate_placement(problem, devices, stated.order())


class _PulpProgram:
    """The program; `order` reads the tasks by their starts off its solution."""

    def __init__(self, problem: PlacementProblem) -> None:
        import pulp

        self.problem, self.lp = problem, pulp.LpProblem("placement", pulp.LpMinimize)
        longest = sum(max(task.seconds) for task in problem.tasks)
        apart = list(itertools.product(range(problem.devices), repeat=2))
        longest += sum(max(problem.delay(t.nbytes, *p) for p in apart) for t in problem.transfers)
        self.unit = longest / 1e3 or 1.0  # all is over by 1000 units
        end = self.lp.add_variable("end", 0, 1e3)
        self.lp.setObjective(pulp.LpAffineExpression([(end, 1.0)]))
        self.start = [self.lp.add_variable(f"start_{v}", 0, 1e3) for v in range(len(problem.tasks))]
        self.on = [
            {
                d: self.lp.add_variable(f"on_{v}_{d}", 0, 1, pulp.LpBinary)
                for d in range(problem.devices)
            }
            for v in range(len(problem.tasks))
        ]
        self.ends = [
            start + pulp.lpSum(task.seconds[d] / self.unit * x for d, x in on.items())
            for start, task, on in zip(self.start, problem.tasks, self.on, strict=True)
        ]
        for v, on in enumerate(self.on):
            self.lp += pulp.lpSum(on.values()) == 1
            self.lp += end >= self.ends[v]
        for d, most in enumerate(problem.limits):
            if most < float("inf"):
                held = [t.memory * on[d] for t, on in zip(problem.tasks, self.on, strict=True)]
                self.lp += pulp.lpSum(held) <= most
        self._transfers()
        self._disjoint()

    def _transfers(self) -> None:
        """A task starts after all its inputs have been computed and have arrived."""
        for t in self.problem.transfers:
            for d, e in itertools.product(range(self.problem.devices), repeat=2):
                delay = self.problem.delay(t.nbytes, d, e) / self.unit
                both = delay * (self.on[t.a][d] + self.on[t.b][e] - 1)
                self.lp += self.start[t.b] >= self.ends[t.a] + both
            self.lp += self.start[t.b] >= self.ends[t.a]

    def _disjoint(self) -> None:
        """Requires that of two tasks on one device one ends before the other starts."""
        import pulp

        for v, w in itertools.combinations(range(len(self.start)), 2):
            first = self.lp.add_variable(f"first_{v}_{w}", 0, 1, pulp.LpBinary)
            for d in range(self.problem.devices):
                free = 2 - self.on[v][d] - self.on[w][d]
                self.lp += self.start[w] >= self.ends[v] - 1e3 * (1 - first + free)
                self.lp += self.start[v] >= self.ends[w] - 1e3 * (first + free)

    def order(self) -> list[int]:
        """Returns the tasks in the order of their starts, each after its predecessors."""
        place = {v: k for k, v in enumerate(self.problem.order)}
        starts = [float(start.varValue or 0.0) for start in self.start]
        waiting = sorted(range(len(starts)), key=lambda v: (starts[v], place[v]))
        order: list[int] = []
        while waiting:
            done = set(order)
            ready = (v for v in waiting if all(t.a in done for t in self.problem.inputs[v]))
            order.append(next(ready))
            waiting.remove(order[-1])
        return order

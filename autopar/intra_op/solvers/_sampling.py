"""Compiled random walks over choices of the whole problem, one node at a time.

The samplers of the literature share these moves: a random node takes a random choice, the change
of the cost is computed from its edges alone, and memory by a segment tree. They differ in their
temperatures and restarts. Forbidden choices and bytes beyond the limit may be left, not entered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Problem, Solution, evaluate
from autopar.intra_op.reduce import flatten
from autopar.intra_op.reduce.flat import Ints
from autopar.intra_op.reduce.numba_compile import entry
from autopar.intra_op.solvers._large.usage_tree import Usage, swap, usage
from autopar.intra_op.solvers._moves import Local, change, local, paid
from autopar.intra_op.solvers._search import Watch

CHUNK = 20_000  # proposals between two looks at the clock
RATE = 1_000_000  # proposals per second of the time limit, at most
WORST_START = 0.5  # chance of the lightest choice of a node at a start


@entry
def propose(
    s: Local, u: Usage, choice: Ints, best: Ints, record: float, rounds: int, heat: float, seed: int
) -> float:
    """Proposes changes of random nodes, accepted by Metropolis' rule at a temperature in seconds.

    An infinite temperature accepts whatever fits. Returns the price of `best`, the cheapest choice
    that fits; it is `record` if none is cheaper.
    """
    np.random.seed(seed)
    now = paid(s, choice)
    for _ in range(rounds):
        v = np.random.randint(len(choice))
        old, new = choice[v], np.random.randint(s.graph.start[v + 1] - s.graph.start[v])
        if new == old:
            continue
        rise = change(s, choice, v, new)
        if rise > 0 and (rise >= 0.1 * s.big or rise > -heat * np.log(np.random.random())):
            continue
        peak = u.top[1]
        swap(s, u, v, old, new)
        if u.top[1] > max(s.limit, peak):
            swap(s, u, v, new, old)
            continue
        choice[v] = new
        now += rise
        if now < record and u.top[1] <= s.limit and now < 0.1 * s.big:
            record = now
            best[:] = choice
    return record


class Sampler:
    """A walk over choices of a problem within a time limit, and `work` seconds of counted work.

    Attributes:
        best, price: the cheapest choice that fits, and its seconds.
    """

    def __init__(
        self,
        problem: Problem,
        time_limit: float,
        seed: int,
        watch: Watch | None,
        work: float | None = None,
    ) -> None:
        self.problem, self.time_limit, self.watch = problem, time_limit, watch
        self.rng = np.random.default_rng(seed)
        self.flat = flatten(problem)
        self.moves = local(self.flat)
        work = time_limit if work is None else work
        self.most, self.done = int(work * RATE) // CHUNK * CHUNK + CHUNK, 0
        self.price, self.best = math.inf, np.zeros(self.flat.nodes, dtype=np.int64)
        self.restart()
        self._propose(0, 0.0)  # compiles the loop, which is no part of the search
        self.started = time.perf_counter()

    def share(self) -> float:
        """Returns the share of the work that is done: by proposals, or by the clock if ahead."""
        spent = (time.perf_counter() - self.started) / max(self.time_limit, 1e-9)
        return min(max(self.done / self.most, spent), 1.0)

    def restart(self) -> None:
        """Restarts: each node takes its choice with the least memory, or a random one."""
        choice = []
        for node in self.problem.nodes:
            lightest = int(np.argmin(np.sum([nbytes for _, nbytes in node.held], axis=0)))
            other = int(self.rng.integers(len(node.cost)))
            choice.append(lightest if self.rng.random() < WORST_START else other)
        self.choice = np.array(choice, dtype=np.int64)
        self.usage = usage(self.moves, self.choice)

    def walk(self, heat: float) -> bool:
        """Makes one chunk of proposals; returns whether a cheaper choice was met."""
        record = self._propose(CHUNK, heat)
        self.done += CHUNK
        better = record < self.price
        if better:
            self.price = record
            if self.watch is not None:
                self.watch(time.perf_counter() - self.started, self.price, -math.inf)
        return better

    def _propose(self, rounds: int, heat: float) -> float:
        seed = int(self.rng.integers(2**31))
        given = self.moves, self.usage, self.choice, self.best, self.price
        return propose(*given, rounds, heat, seed)

    def solution(self, solver: str) -> Solution:
        """Returns the best choice; raises InfeasibleError if none was met that fits."""
        if self.price == math.inf:
            raise InfeasibleError(
                f"{solver} met no choice that fits",
                where=f"problem {self.problem.name!r}",
                why="it changes one node at a time, from random starts; there may still be one",
                todo="use the ilp solver",
            )
        choice = tuple(self.best.tolist())
        price = evaluate(self.problem, choice).cost
        seconds = time.perf_counter() - self.started
        least = [min(node.cost) for node in self.problem.nodes]
        bound = math.fsum([*least, *(float(edge.cost.min()) for edge in self.problem.edges)])
        ended = "work" if self.done >= self.most else "time"
        return Solution(choice, price, min(bound, price), solver, seconds, ended=ended)


def sampled(
    problem: Problem,
    solver: str,
    time_limit: float,
    seed: int,
    watch: Watch | None,
    heat: Callable[[Sampler, bool], float],
    work: float | None = None,
) -> Solution:
    """Walks until the work is done or time is up.

    `heat` returns the temperature of the next chunk in seconds, given the walk and whether the last
    chunk met a cheaper choice; it may restart the walk.
    """
    sampler = Sampler(problem, time_limit, seed, watch, work)
    better = False
    while sampler.share() < 1:
        better = sampler.walk(heat(sampler, better))
    return sampler.solution(solver)

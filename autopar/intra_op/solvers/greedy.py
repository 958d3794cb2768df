"""Coordinate descent: fast, without proof; other solvers use it to polish their results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.reduce import critical_times, infinite

MOST_SWEEPS = 100


def solve(problem: Problem, **_: Any) -> Solution:
    """Returns the better of two local optima that fit.

    They start from every node's least cost and from every node's least memory, and change one node
    at a time. The bound is the sum of all least costs.

    Raises:
        InfeasibleError: neither fits. Another solver may still find a choice that does.
    """
    started = time.perf_counter()
    tables = Tables(problem)
    starts = [
        [int(np.argmin(cost)) for cost in tables.cost],
        [int(np.argmin(tables.most(v))) for v in range(len(problem.nodes))],
    ]
    fitting = [choice for choice in map(tables.descend, starts) if tables.fits(choice)]
    if not fitting:
        raise InfeasibleError(
            "the greedy solver found no choice that fits",
            where=f"problem {problem.name!r}",
            why="changing one node at a time reaches none; there may still be one",
            todo="use the ilp solver",
        )
    best = min(fitting, key=tables.price)
    price, bound = tables.price(best), tables.bound()
    return Solution(best, price, min(price, bound), "greedy", time.perf_counter() - started)


class Tables:
    """A problem as arrays with infinite forbidden costs, for fast prices of single changes.

    Attributes:
        cost: per node, one entry for each choice.
        edges: per node, its neighbours and the matrices, with its own choices first.
        times: the critical times.
        pieces: per node its memory, each piece with the range of these times at which it is held.
    """

    def __init__(self, problem: Problem) -> None:
        self.limit = math.inf if problem.memory_limit is None else problem.memory_limit
        self.cost = [infinite(np.array(node.cost)) for node in problem.nodes]
        self.edges: list[list[tuple[int, NDArray[np.float64]]]] = [[] for _ in problem.nodes]
        for edge in problem.edges:
            matrix = infinite(edge.cost)
            self.edges[edge.a].append((edge.b, matrix))
            self.edges[edge.b].append((edge.a, matrix.T))
        self.times = critical_times(problem)
        self.pieces = [
            [(*np.searchsorted(self.times, live).tolist(), np.array(held)) for live, held in n.held]
            for n in problem.nodes
        ]

    def price(self, choice: Sequence[int]) -> float:
        """Returns the seconds of a choice, infinite if it takes something forbidden."""
        prices = [float(cost[k]) for cost, k in zip(self.cost, choice, strict=True)]
        for node, edges in enumerate(self.edges):
            prices += [float(m[choice[node], choice[b]]) for b, m in edges if node < b]
        return math.fsum(prices)

    def held(self, choice: Sequence[int]) -> NDArray[np.float64]:
        """Returns the bytes at each critical time."""
        held = np.zeros(len(self.times))
        for v, k in enumerate(choice):
            self.hold(held, v, k)
        return held

    def hold(self, held: NDArray[np.float64], node: int, choice: int, sign: float = 1.0) -> None:
        """Adds a node's bytes at each critical time, or subtracts them with a sign of -1."""
        for low, high, nbytes in self.pieces[node]:
            held[low:high] += sign * nbytes[choice]

    def most(self, node: int) -> NDArray[np.float64]:
        """Returns the total bytes of each choice over all its pieces."""
        return sum((b for _, _, b in self.pieces[node]), np.zeros(len(self.cost[node])))

    def above(self, held: NDArray[np.float64], node: int) -> NDArray[np.float64]:
        """Returns the worst excess of each choice over the limit, given the other nodes' bytes."""
        excess = np.zeros(len(self.cost[node]))
        for low, high, nbytes in self.pieces[node]:
            if low < high:
                np.maximum(excess, nbytes + held[low:high].max() - self.limit, out=excess)
        return excess

    def fits(self, choice: Sequence[int]) -> bool:
        """Returns whether nothing forbidden is taken and the peak is within the limit."""
        within = self.limit == math.inf or float(self.held(choice).max(initial=0.0)) <= self.limit
        return within and self.price(choice) < math.inf

    def bound(self) -> float:
        """Returns the sum of the least cost of every node and edge."""
        least = [float(cost.min()) for cost in self.cost]
        for node, edges in enumerate(self.edges):
            least += [float(matrix.min()) for b, matrix in edges if node < b]
        return math.fsum(least)

    def descend(self, start: Sequence[int]) -> tuple[int, ...]:
        """Returns a choice that no change of one node improves.

        Fewer forbidden costs come first, then less memory above the limit, then less cost.
        """
        choice = list(start)
        held = self.held(choice)
        for _ in range(MOST_SWEEPS):
            changed = False
            for node, cost in enumerate(self.cost):
                if len(cost) == 1:
                    continue
                prices = [cost, *(matrix[:, choice[b]] for b, matrix in self.edges[node])]
                total, wrong = np.zeros(len(cost)), np.zeros(len(cost))
                for price in prices:
                    barred = np.isinf(price)
                    wrong += barred
                    total += np.where(barred, 0.0, price)
                now = choice[node]
                self.hold(held, node, now, -1.0)
                above = self.above(held, node)
                best = int(np.lexsort((total, above, wrong))[0])
                if (wrong[best], above[best], total[best]) < (wrong[now], above[now], total[now]):
                    choice[node], changed = best, True
                self.hold(held, node, choice[node])
            if not changed:
                break
        return tuple(choice)

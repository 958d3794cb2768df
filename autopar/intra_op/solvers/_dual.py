"""Lower bounds by moving costs about and pricing memory, and what they rule out.

Two relaxations together. Memory is priced instead of limited (Lagrange multipliers, Polyak's
subgradient steps): a choice pays lambda_t for every byte that it holds at time t, and lambda_t
times the limit is given back. Costs are moved between edges and nodes so that the least entries,
which can be taken without looking at one another, add up to as much as possible (sequential
tree-reweighted message passing, TRW-S; Kolmogorov, IEEE PAMI 28, 2006). The sum of least entries is
a lower bound.

A choice, or pair of choices, whose entry exceeds its least one by more than what separates the
bound from the best known choice is in no better one: it can be forbidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.intra_op.problem import FORBIDDEN, Problem
from autopar.intra_op.solvers.greedy import Tables

Array = NDArray[np.float64]

SWEEPS = 120
PATIENCE = 6  # sweeps without a better bound before steps are halved


@dataclass(frozen=True)
class Tightened:
    """The proven lower bound in seconds, the best choice that fits (or None) with its price in
    seconds (or infinity), and the problem with everything forbidden that cannot beat it.
    """

    bound: float
    choice: tuple[int, ...] | None
    price: float
    problem: Problem


def tighten(problem: Problem, gap: float, expired: Callable[[], bool]) -> Tightened:
    """Bounds a problem from both sides until they meet within `gap`, time is up, or it stalls.

    Every choice of the problem must have an allowed partner at every neighbour.
    """
    tables, state = Tables(problem), _Moved(problem)
    bound, best, price, step, stalled = -math.inf, None, math.inf, 1.0, 0
    multipliers = state.multipliers
    starts = [[int(np.argmin(memory)) for memory in tables.memory]]
    for sweep in range(SWEEPS):
        guess = state.sweep(backward=bool(sweep % 2))
        for start in (guess, *starts):
            candidate = tables.descend(start)
            if tables.fits(candidate) and tables.price(candidate) < price:
                best, price = candidate, tables.price(candidate)
        starts = []
        stalled = 0 if state.bound > bound + 1e-7 * abs(bound) else stalled + 1
        if state.bound > bound:
            bound, multipliers = state.bound, state.multipliers
        if price - bound <= gap * abs(price) or expired() or step < 1e-3:
            break
        if stalled >= PATIENCE:
            step, stalled = step / 2, 0
            state.charge(multipliers)
        else:
            over = tables.held(guess) - tables.limit
            target = price if price < math.inf else bound + 0.1 * abs(bound)
            state.charge(_stepped(state.multipliers, over, step * (target - state.bound)))
    if price == math.inf:
        return Tightened(bound, None, price, problem)
    state.charge(multipliers)
    for sweep in range(4):
        state.sweep(backward=bool(sweep % 2))
        bound = max(bound, state.bound)
    return Tightened(bound, best, price, state.without(price))


def _stepped(multipliers: Array, over: Array, rise: float) -> Array:
    """Multipliers along the subgradient `over`, in bytes, so far that the bound could rise so."""
    over = np.where((multipliers > 0) | (over > 0), over, 0.0)
    length = float(over @ over)
    if not math.isfinite(length) or length == 0:
        return multipliers
    return np.maximum(multipliers + max(rise, 0.0) / length * over, 0.0)


class _Moved:
    """A problem with its costs moved about: `constant` and what is left at nodes and edges.

    For every choice the sum is what it was, plus the price of memory; nothing left is negative.
    """

    def __init__(self, problem: Problem) -> None:
        tables = Tables(problem)
        self.problem, self.limit = problem, tables.limit
        self.cost, self.memory, self.spans = tables.cost, tables.memory, tables.spans
        self.multipliers = np.zeros(len(tables.times))
        self.constant = 0.0
        self.matrices = [np.where(e.cost >= FORBIDDEN, np.inf, e.cost) for e in problem.edges]
        self.edges: list[list[tuple[int, Array]]] = [[] for _ in problem.nodes]
        for edge, matrix in zip(problem.edges, self.matrices, strict=True):
            least = matrix.min()
            matrix -= least
            self.constant += float(least)
            self.edges[edge.a].append((edge.b, matrix))
            self.edges[edge.b].append((edge.a, matrix.T))
        for node in range(len(self.cost)):
            self._settle(node)

    @property
    def bound(self) -> float:
        """Seconds that no choice that fits falls below, a little less for rounding's sake."""
        refund = float(self.multipliers.sum()) * self.limit if self.multipliers.any() else 0.0
        return self.constant - refund - 1e-12 * (abs(self.constant) + refund)

    def _settle(self, node: int) -> None:
        least = float(self.cost[node].min())
        self.cost[node] -= least
        self.constant += least

    def charge(self, multipliers: Array) -> None:
        """Sets the price of memory, in seconds per byte at each critical time."""
        rise, self.multipliers = multipliers - self.multipliers, multipliers
        for node, (low, high) in enumerate(self.spans):
            self.cost[node] += rise[low:high].sum() * self.memory[node]
            self._settle(node)

    def sweep(self, backward: bool) -> list[int]:
        """Moves the costs of every edge to the node that is reached first and on to later edges.

        Returns a choice, made on the way: each node's best given those before it.
        """
        count = len(self.cost)
        guess = [0] * count
        for node in range(count - 1, -1, -1) if backward else range(count):
            cost, edges = self.cost[node], self.edges[node]
            self._gather(node)
            later = [matrix for other, matrix in edges if (other > node) != backward]
            view = cost.copy()
            for other, matrix in edges:
                if (other < node) != backward:
                    view += matrix[:, guess[other]]
            guess[node] = int(np.argmin(view))
            if later:
                share = cost / max(len(later), len(edges) - len(later))
                for matrix in later:
                    matrix += share[:, None]
                cost -= share * len(later)
                np.maximum(cost, 0.0, out=cost)
        return guess

    def _gather(self, node: int) -> None:
        for _, matrix in self.edges[node]:
            least = matrix.min(axis=1)
            matrix -= least[:, None]
            self.cost[node] += least
        self._settle(node)

    def without(self, price: float) -> Problem:
        """Returns the problem without what cannot be part of a choice cheaper than `price`."""
        for node in range(len(self.cost)):
            self._gather(node)
        scale = abs(price) + abs(self.constant)
        room = price - self.bound + 1e-9 * scale  # keeps the best choice, whatever the rounding
        reach = [
            cost + sum(matrix.min(axis=1) for _, matrix in edges)
            for cost, edges in zip(self.cost, self.edges, strict=True)
        ]
        nodes = tuple(
            replace(node, cost=tuple(np.where(far > room, FORBIDDEN, node.cost).tolist()))
            for node, far in zip(self.problem.nodes, reach, strict=True)
        )
        edges = tuple(
            replace(
                edge,
                cost=np.where(
                    self.cost[edge.a][:, None] + matrix + self.cost[edge.b] > room,
                    FORBIDDEN,
                    edge.cost,
                ),
            )
            for edge, matrix in zip(self.problem.edges, self.matrices, strict=True)
        )
        return replace(self.problem, nodes=nodes, edges=edges)

"""Propagation: decided layouts spread through the graph, without search.

After GSPMD (arXiv:2105.04663, section 3.5), which spreads annotated layouts over a graph, the most
informative first, forwards and backwards, until nothing changes. Here prices decide the order:

1. Nodes with few choices are decided first: annotations, pins, inputs. Choices multiply with the
   axes of a mesh, so few means at most the square root of the median.
2. A node next to decided ones follows them: it takes a choice that needs no resharding between
them,
   and of several the one that is cheapest together with the cheapest choices of its other
   neighbours. If there is none it takes the one that is cheapest with its decided neighbours.
3. Of all nodes that could follow, those that follow for free come first, and of these the one whose
   own cost rises least. So splits spread before replication, since an operator that follows a whole
   value must compute all of it.
4. If the decided nodes constrain no other, one with the fewest choices takes its cheapest.

Every node is decided once. Memory is checked only at the end.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import FORBIDDEN, Problem, Solution, evaluate

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def solve(problem: Problem, **_: Any) -> Solution:
    """Returns the choice that the decided nodes lead to; the bound is the sum of all least costs.

    Raises:
        InfeasibleError: the choice exceeds the memory limit or has something forbidden. Another
            solver may still find a choice that fits.
    """
    started = time.perf_counter()
    choice = _Propagation(problem).run()
    judged = evaluate(problem, choice)
    if not judged.feasible:
        raise InfeasibleError(
            "the choice found by propagation does not fit",
            where=f"problem {problem.name!r}",
            why="it never revises a decision, and reached something forbidden"
            if judged.cost == math.inf
            else f"peak: {judged.peak:.6g} bytes, limit: {problem.memory_limit}; it checks "
            "memory only at the end",
            todo="use the ilp solver, which searches for a fit, or annotate or pin more",
        )
    least = [min(node.cost) for node in problem.nodes]
    bound = math.fsum([*least, *(float(edge.cost.min()) for edge in problem.edges)])
    seconds = time.perf_counter() - started
    return Solution(choice, judged.cost, min(bound, judged.cost), "propagate", seconds)


@dataclass
class _End:
    """One end of an edge: the node at the other end, and costs with this end's choices first.

    The costs are relative to the least of the edge. `now` is the cost of each own choice: with the
    other end's choice once decided, before that with the other end's own cheapest choice.
    """

    other: int
    cost: Array
    now: Array


class _Propagation:
    """Decides nodes one after the other.

    Attributes:
        choice: choice of every decided node.
        waiting: priority of every undecided node that decided ones constrain.
    """

    def __init__(self, problem: Problem) -> None:
        self.cost = [np.array(node.cost) for node in problem.nodes]
        self.ends: list[list[_End]] = [[] for _ in problem.nodes]
        for edge in problem.edges:
            extra = edge.cost - edge.cost.min()
            for own, other, matrix in ((edge.a, edge.b, extra), (edge.b, edge.a, extra.T)):
                now = (matrix + self.cost[other]).min(axis=1)
                self.ends[own].append(_End(other, matrix, now))
        self.choice: dict[int, int] = {}
        self.waiting: dict[int, tuple[bool, float, int]] = {}

    def run(self) -> tuple[int, ...]:
        """Returns the choice of every node."""
        sizes = [len(cost) for cost in self.cost]
        few = math.sqrt(statistics.median(sizes)) if sizes else 0.0
        for node in sorted(range(len(sizes)), key=sizes.__getitem__):
            if sizes[node] > few:
                self._spread()
            if node not in self.choice:
                self._decide(node)
        self._spread()
        return tuple(self.choice[node] for node in range(len(self.cost)))

    def _spread(self) -> None:
        while self.waiting:
            self._decide(min(self.waiting, key=lambda node: (self.waiting[node], node)))

    def _decide(self, node: int) -> None:
        """Decides one node, and updates its neighbours."""
        self.waiting.pop(node, None)
        kept, _ = self._follow(node, self._said(node))
        hoped = sum((e.now for e in self.ends[node] if e.other not in self.choice), self.cost[node])
        chosen = int(np.argmin(np.where(kept, hoped, np.inf)))
        self.choice[node] = chosen
        for other in {end.other for end in self.ends[node]} - self.choice.keys():
            for end in self.ends[other]:
                if end.other == node:
                    end.now = end.cost[:, chosen]
            costs = self._said(other)
            if np.ptp(costs) > 0:
                kept, free = self._follow(other, costs)
                rise = float((self.cost[other] + costs)[kept].min() - self.cost[other].min())
                self.waiting[other] = not free, rise, int(kept.sum())

    def _said(self, node: int) -> Array:
        """Returns the cost of each choice of a node with its decided neighbours."""
        none = np.zeros_like(self.cost[node])
        return sum((end.now for end in self.ends[node] if end.other in self.choice), none)

    def _follow(self, node: int, said: Array) -> tuple[Mask, bool]:
        """Returns the choices that follow a node's decided neighbours, and whether for free."""
        free = (said == 0) & (self.cost[node] < FORBIDDEN)
        if free.any():
            return free, True
        total = self.cost[node] + said
        return total <= total.min() * (1 + 1e-9), False

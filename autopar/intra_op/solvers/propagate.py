"""Propagation: what is decided spreads, and nothing is searched for.

After GSPMD (arXiv:2105.04663, section 3.5), which lets annotated layouts spread over a graph, the
most telling ones first, forwards and backwards, until nothing changes. Here prices say what tells:

1. Nodes with few choices are decided first: annotations, pins, inputs. Choices multiply with the
   axes of a mesh, so few are at most the square root of the median.
2. A node next to decided ones follows them: it takes a choice that needs no resharding between it
   and them, of several that which is cheapest with the cheapest that its other neighbours may
   choose. Where there is none it takes what is cheapest with its decided neighbours.
3. Of all nodes that could, the one that follows for free decides first, and of these the one whose
   own cost rises least. So splits spread before wholes, since to follow a value that is whole an
   operator must compute the whole of it.
4. If decided nodes say nothing about any other, one with the fewest choices takes its cheapest.

Every node is decided once. Memory is looked at in the end only.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import FORBIDDEN, Problem, Solution, evaluate

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def solve(problem: Problem) -> Solution:
    """Returns what the decided nodes lead to; the bound is the sum of all least costs.

    Raises:
        InfeasibleError: that exceeds the memory limit or has something forbidden. Another solver
            may still find a choice that fits.
    """
    started = time.perf_counter()
    choice = _Spreading(problem).run()
    judged = evaluate(problem, choice)
    if not judged.feasible:
        raise InfeasibleError(
            "what propagation leads to does not fit",
            where=f"problem {problem.name!r}",
            why="it takes back nothing that is decided, and has come to something forbidden"
            if judged.cost == math.inf
            else f"peak: {judged.peak:.6g} bytes, limit: {problem.memory_limit}; it looks at "
            "memory in the end only",
            todo="use the ilp solver, which searches for what fits, or annotate or pin more",
        )
    least = [min(node.cost) for node in problem.nodes]
    bound = math.fsum([*least, *(float(edge.cost.min()) for edge in problem.edges)])
    seconds = time.perf_counter() - started
    return Solution(choice, judged.cost, min(bound, judged.cost), "propagate", seconds)


@dataclass
class _End:
    """One end of an edge: the node at the other end, and costs with the own choices first.

    The costs are counted from the least of the edge. `now` is what each own choice costs here: once
    the other end is decided with that, before with what is cheapest for the other end by itself.
    """

    other: int
    cost: Array
    now: Array


class _Spreading:
    """Nodes that are decided one after the other.

    Attributes:
        choice: of every node that is decided.
        waiting: of every undecided node that decided ones say something about, its turn.
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
        """The choice of every node."""
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
        """Settle one node, and look at its neighbours again."""
        self.waiting.pop(node, None)
        kept, _ = self._follow(node, self._said(node))
        hoped = sum((e.now for e in self.ends[node] if e.other not in self.choice), self.cost[node])
        chosen = int(np.argmin(np.where(kept, hoped, np.inf)))
        self.choice[node] = chosen
        for other in {end.other for end in self.ends[node]} - self.choice.keys():
            for end in self.ends[other]:
                if end.other == node:
                    end.now = end.cost[:, chosen]
            said = self._said(other)
            if np.ptp(said) > 0:
                kept, free = self._follow(other, said)
                rise = float((self.cost[other] + said)[kept].min() - self.cost[other].min())
                self.waiting[other] = not free, rise, int(kept.sum())

    def _said(self, node: int) -> Array:
        """What each choice of a node costs with its decided neighbours."""
        none = np.zeros_like(self.cost[node])
        return sum((end.now for end in self.ends[node] if end.other in self.choice), none)

    def _follow(self, node: int, said: Array) -> tuple[Mask, bool]:
        """The choices with which a node follows its decided neighbours, and whether for free."""
        free = (said == 0) & (self.cost[node] < FORBIDDEN)
        if free.any():
            return free, True
        total = self.cost[node] + said
        return total <= total.min() * (1 + 1e-9), False

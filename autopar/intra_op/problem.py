"""The strategy problem: one choice for every node, at the least cost, within memory.

A problem is a graph. Every node has a list of choices, each with a cost in seconds and a memory in
bytes that is held during the node's half-open interval of time. Every edge has a matrix of costs,
one entry for each pair of choices at its two ends. A node may hold further memory at other times.
A solution picks one choice for every node so that the sum of all costs is least and the memory held
at any time is at most the limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError, ProblemError
from autopar.ir.units import format_bytes

Matrix = NDArray[np.float64]

FORBIDDEN = 1e18
"""A choice, or a pair of choices, with this cost or more is forbidden."""


Held = tuple[tuple[int, int], tuple[float, ...]]
"""A half-open interval of time, and the bytes of each choice that are held in it."""


@dataclass(frozen=True)
class Choices:
    """One node: parallel lists over its choices.

    Args:
        name: name of the node in messages.
        labels: a description of each choice.
        cost: seconds of each choice; `FORBIDDEN` or more means that it must not be taken.
        memory: bytes of each choice, held at every time t with live[0] <= t < live[1].
        live: the half-open interval of time; (t, t) is empty.
        more: further memory, at other times or in addition at the same ones.

    Raises:
        ProblemError: no choices, lists of different lengths, a cost that is NaN or minus infinity,
            memory that is negative or not finite, or an interval that ends before it begins.
    """

    name: str
    labels: tuple[str, ...]
    cost: tuple[float, ...]
    memory: tuple[float, ...]
    live: tuple[int, int]
    more: tuple[Held, ...] = ()

    def __post_init__(self) -> None:
        where = f"node {self.name!r}"
        cost = tuple(map(float, self.cost))
        if cost and max(cost) > FORBIDDEN:
            cost = tuple(min(value, FORBIDDEN) for value in cost)
        object.__setattr__(self, "labels", tuple(self.labels))
        object.__setattr__(self, "memory", tuple(map(float, self.memory)))
        object.__setattr__(self, "live", tuple(self.live))
        if not cost:
            raise ProblemError("a node has no choices", where=where, todo="give it one")
        more = tuple((tuple(live), tuple(map(float, nbytes))) for live, nbytes in self.more)
        object.__setattr__(self, "more", more)
        if not len(cost) == len(self.labels):
            raise ProblemError(
                "a node's lists differ in length",
                where=where,
                why=f"{len(self.labels)} labels, {len(cost)} costs, {len(self.memory)} memories",
            )
        if min(cost) == -math.inf or math.isnan(sum(cost)):
            raise ProblemError(
                "a cost is not a number or is minus infinity", where=where, todo="correct it"
            )
        for live, nbytes in self.held:
            _check_memory(where, len(cost), live, nbytes)
        object.__setattr__(self, "cost", cost)

    @property
    def held(self) -> tuple[Held, ...]:
        """All intervals of memory: the first, then the further ones."""
        return ((self.live, self.memory), *self.more)

    def lighter(self, index: int, other: int) -> bool:
        """Returns whether choice `index` never holds more than choice `other`."""
        return all(nbytes[index] <= nbytes[other] for _, nbytes in self.held)


def _check_memory(where: str, count: int, live: tuple[int, int], nbytes: Sequence[float]) -> None:
    if len(nbytes) != count:
        raise ProblemError(
            "a node's lists differ in length",
            where=where,
            why=f"{count} costs, {len(nbytes)} memories",
        )
    if not (min(nbytes) >= 0 and max(nbytes) < math.inf) or math.isnan(sum(nbytes)):
        raise ProblemError(
            "memory is negative or not a finite number of bytes", where=where, todo="correct it"
        )
    if len(live) != 2 or live[0] > live[1]:
        raise ProblemError(
            "a live interval ends before it begins", where=where, why=f"live = {live}"
        )


@dataclass(frozen=True, eq=False)
class Edge:
    """Costs in seconds of all pairs of choices of nodes `a` and `b`: shape (choices of a, of b).

    The matrix is copied and made read-only. Parallel edges are allowed and add up.

    Raises:
        ProblemError: both ends are the same node, the costs are not a matrix, or a cost is NaN or
            minus infinity.
    """

    a: int
    b: int
    cost: Matrix

    def __post_init__(self) -> None:
        where = f"edge {self.a}-{self.b}"
        cost = np.array(self.cost, dtype=np.float64)
        if self.a == self.b:
            raise ProblemError(
                "an edge joins a node to itself",
                where=where,
                todo="add the diagonal of its matrix to the node's costs",
            )
        if cost.ndim != 2:
            raise ProblemError(
                "an edge's costs are not a matrix", where=where, why=f"shape {cost.shape}"
            )
        if not bool((cost > -np.inf).all()):
            raise ProblemError(
                "a cost is not a number or is minus infinity", where=where, todo="correct it"
            )
        np.minimum(cost, FORBIDDEN, out=cost)
        cost.setflags(write=False)
        object.__setattr__(self, "cost", cost)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Edge):
            return NotImplemented
        return (self.a, self.b) == (other.a, other.b) and np.array_equal(self.cost, other.cost)

    def __hash__(self) -> int:
        return hash((self.a, self.b, self.cost.shape, self.cost.tobytes()))


@dataclass(frozen=True)
class Problem:
    """Nodes, edges between them by index, and the memory limit in bytes.

    None means no limit; an infinite limit becomes None.

    Raises:
        ProblemError: an edge names a node that does not exist or has a matrix of the wrong shape;
            the limit is negative or NaN.
    """

    name: str
    nodes: tuple[Choices, ...]
    edges: tuple[Edge, ...]
    memory_limit: float | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "edges", tuple(self.edges))
        if self.memory_limit == math.inf:
            object.__setattr__(self, "memory_limit", None)
        if self.memory_limit is not None and not self.memory_limit >= 0:
            raise ProblemError(
                "the memory limit is negative or not a number",
                where=f"problem {self.name!r}",
                why=f"memory_limit = {self.memory_limit}",
            )
        sizes = [len(node.cost) for node in self.nodes]
        for edge in self.edges:
            where = f"problem {self.name!r}, edge {edge.a}-{edge.b}"
            if not (0 <= edge.a < len(sizes) and 0 <= edge.b < len(sizes)):
                raise ProblemError(
                    "an edge names a node that does not exist",
                    where=where,
                    why=f"there are {len(sizes)} nodes",
                )
            if edge.cost.shape != (sizes[edge.a], sizes[edge.b]):
                raise ProblemError(
                    "an edge's matrix does not fit its nodes",
                    where=where,
                    why=f"shape {edge.cost.shape}, choices ({sizes[edge.a]}, {sizes[edge.b]})",
                )

    def split(self) -> Problem:
        """Returns the same problem with one interval per node.

        Further intervals become nodes at the end of the list that must agree with theirs.
        """
        nodes = [replace(node, more=()) for node in self.nodes]
        edges = list(self.edges)
        for index, node in enumerate(self.nodes):
            size = len(node.cost)
            agree = np.where(np.eye(size, dtype=bool), 0.0, FORBIDDEN)
            for number, (live, nbytes) in enumerate(node.more):
                edges.append(Edge(index, len(nodes), agree))
                name = f"{node.name}, further memory {number}"
                nodes.append(Choices(name, node.labels, (0.0,) * size, nbytes, live))
        return replace(self, nodes=tuple(nodes), edges=tuple(edges))


@dataclass(frozen=True)
class Solution:
    """A solver's choice for every node.

    Args:
        choice: the index of the choice of each node.
        objective: seconds, the sum of all costs of the choice.
        bound: seconds, a proven lower bound on the cost of every choice that fits.
        solver: the solver's name.
        seconds: solving time.
        left: nodes that remained after reductions, if the solver reduces.
        ended: the reason for the end of a search: "proof" of the gap, "work" or "time"; empty if
            the solver does not search. Only "time" depends on the machine's speed.
    """

    choice: tuple[int, ...]
    objective: float
    bound: float
    solver: str
    seconds: float
    left: int | None = None
    ended: str = ""

    @property
    def gap(self) -> float:
        """Relative distance of objective and bound; 0 if the choice is optimal."""
        return (self.objective - self.bound) / abs(self.objective) if self.objective else 0.0


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`: seconds (infinite if forbidden), peak bytes, and feasibility."""

    cost: float
    peak: float
    feasible: bool


def evaluate(problem: Problem, solution: Solution | Sequence[int]) -> Evaluation:
    """Prices a choice, independently of any solver.

    Where memory comes near the limit it is summed in exact arithmetic, so that the verdict does not
    depend on the order of the nodes.

    Returns:
        The cost of all nodes and edges in seconds, the peak memory in bytes, and whether nothing
        forbidden was taken and the peak is within the limit.

    Raises:
        ProblemError: the number of choices differs from that of the nodes, or one is out of range.
    """
    choice = solution.choice if isinstance(solution, Solution) else tuple(solution)
    if len(choice) != len(problem.nodes):
        raise ProblemError(
            "a solution does not fit its problem",
            where=f"problem {problem.name!r}",
            why=f"{len(choice)} choices for {len(problem.nodes)} nodes",
        )
    prices: list[float] = []
    changes: defaultdict[int, list[float]] = defaultdict(list)
    for node, index in zip(problem.nodes, choice, strict=True):
        if not 0 <= index < len(node.cost):
            raise ProblemError(
                "a choice is out of range",
                where=f"node {node.name!r}",
                why=f"choice {index} of {len(node.cost)}",
            )
        prices.append(node.cost[index])
        for (start, end), nbytes in node.held:
            if start < end:
                changes[start].append(nbytes[index])
                changes[end].append(-nbytes[index])
    for edge in problem.edges:
        prices.append(float(edge.cost[choice[edge.a], choice[edge.b]]))
    limit = math.inf if problem.memory_limit is None else problem.memory_limit
    peak = _peak(changes, math.fsum)
    if abs(peak - limit) < 1e-9 * limit < math.inf:
        peak = _peak(changes, lambda amounts: sum(map(Fraction, amounts)))
    allowed = all(price < FORBIDDEN for price in prices)
    cost = math.fsum(prices) if allowed else math.inf
    return Evaluation(cost, float(peak), allowed and peak <= limit)


def _peak(
    changes: Mapping[int, Sequence[float]],
    total: Callable[[Sequence[float]], float | Fraction],
) -> float | Fraction:
    """Returns the peak of a quantity, given its changes at some times."""
    held = peak = total(())
    for time in sorted(changes):
        held += total(changes[time])
        peak = max(peak, held)
    return peak


def frugal(nodes: Sequence[Choices]) -> tuple[int, dict[str, float]]:
    """Returns the time at which the lightest choices hold most, and each node's bytes at that time.

    No choice of all nodes has a lower peak than their sum. Without memory, the time is 0.
    """
    changes: defaultdict[int, float] = defaultdict(float)
    for node in nodes:
        for (start, end), nbytes in node.held:
            changes[start] += min(nbytes)
            changes[end] -= min(nbytes)
    held, most, worst = 0.0, -math.inf, 0
    for time in sorted(changes):
        held += changes[time]
        if held > most:
            most, worst = held, time
    least: defaultdict[str, float] = defaultdict(float)
    for node in nodes:
        for (start, end), nbytes in node.held:
            if start <= worst < end:
                least[node.name] += min(nbytes)
    return worst, dict(least)


def too_small(
    what: str, limit: float, need: float, held: Mapping[str, float], where: str = ""
) -> InfeasibleError:
    """Returns an error that says how much memory is missing, and which tensors take the most.

    Args:
        what: opening words of the message, saying what does not fit.
        limit, need: bytes of a device, and bytes of the smallest plan.
        held: bytes of each node.
        where: point of the step.
    """
    ranked = sorted(((nbytes, name) for name, nbytes in held.items()), reverse=True)
    largest = ", ".join(f"%{name} {format_bytes(nbytes)}" for nbytes, name in ranked[:3])
    return InfeasibleError(
        f"{what} into {format_bytes(limit)} a device",
        where=where,
        why=f"the smallest needs {format_bytes(need)}, {format_bytes(need - limit)} more; largest: "
        f"{largest}",
        todo="use more devices, a smaller batch, a lower precision or a leaner optimizer",
    )

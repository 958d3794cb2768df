"""Exact reductions: a smaller problem with the same optimum, and the way back.

A problem without memory is a partitioned Boolean quadratic problem (PBQP). The eliminations are
R0, R1 and R2 of Scholz and Eckstein, "Register allocation for irregular architectures" (LCTES
2002); dominance is dead-end elimination, Goldstein's criterion (Biophysical Journal 66, 1994).
Every rule below states in one sentence why no optimum is lost. Computation graphs are close to
series-parallel, so that without memory the rules alone solve most of them.

Forbidden costs are infinite in here, so that they survive every addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import FORBIDDEN, Choices, Edge, Problem

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Reduction:
    """A smaller problem, and `expand`: a choice for it to a choice for the original one.

    A choice for the smaller problem costs what its expansion costs, and it fits in memory if and
    only if its expansion does (its peak alone may be lower, where memory cannot bind). Nodes that
    are gone leave behind nodes of a single choice: one for their cost, others for their memory.
    """

    problem: Problem
    expand: Callable[[Sequence[int]], tuple[int, ...]]


def critical_times(problem: Problem) -> NDArray[np.int64]:
    """Returns the increasing times at which the set of live nodes is maximal, shape (times,).

    Memory that fits at these times fits at all: between two of them nodes only end and then only
    start, so that the live nodes are a subset of those at the one or the other.
    """
    lives = [node.live for node in problem.nodes if node.live[0] < node.live[1]]
    ends = np.unique(np.array([end for _, end in lives], dtype=np.int64))
    starts = np.unique(np.array([start for start, _ in lives], dtype=np.int64))
    if not len(starts):
        return starts
    # A start is critical if some node ends after it and not after the next start.
    following = np.append(starts[1:], ends[-1])
    index = np.searchsorted(ends, starts, side="right")
    return starts[ends[index] <= following]


def reduce(problem: Problem) -> Reduction:
    """Applies all reductions until none changes anything; without a limit, memory is ignored.

    Raises:
        InfeasibleError: no choice avoids everything forbidden and fits; the least attainable peak
            is in the message where memory is the reason.
    """
    work = _Work(problem)
    restrict_memory(work)
    forbid(work, range(len(problem.nodes)))
    while True:
        for a in sorted(work.alive):
            for b in [b for b in work.edges[a] if a < b]:
                fold_separable(work, a, b)
        eliminate(work)
        dropped = restrict_memory(work)
        for node in sorted(work.alive):
            dropped |= dominate(work, node)
        if not dropped:
            return Reduction(*_finish(work))


class _Work:
    """The problem while it is reduced: arrays per node, a matrix per pair of neighbours.

    Attributes:
        kept: per node the original indices of the choices that are left, increasing.
        cost, memory: per node, for these choices.
        edges: edges[a][b] is the matrix of shape (choices of a, of b) and edges[b][a] its
            transpose; matrices are replaced, never written to.
        span: per node the range of critical times at which it is live.
        base: bytes held by nodes that are gone, per critical time.
        binds: per critical time, whether memory can exceed the limit there.
        undo: what was eliminated, in order; see `_Gone`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.limit = problem.memory_limit
        self.kept = [np.arange(len(node.cost)) for node in problem.nodes]
        self.cost = [infinite(np.array(node.cost)) for node in problem.nodes]
        self.memory = [np.array(node.memory) for node in problem.nodes]
        self.alive = set(range(len(problem.nodes)))
        self.edges: list[dict[int, Array]] = [{} for _ in problem.nodes]
        self.times = critical_times(problem)
        self.span = spans_of(problem, self.times)
        self.base = np.zeros(len(self.times))
        self.binds = np.zeros(len(self.times), dtype=bool)
        self.undo: list[_Gone] = []
        self.constant = 0.0
        for edge in problem.edges:
            merge_parallel(self, edge.a, edge.b, infinite(edge.cost))

    def memory_free(self, node: int) -> bool:
        """Whether the node's choice cannot decide if memory suffices."""
        low, high = self.span[node]
        memory = self.memory[node]
        return memory.min() == memory.max() or not self.binds[low:high].any()

    def restrict(self, node: int, keep: NDArray[np.bool_]) -> None:
        if not keep.any():
            raise InfeasibleError(
                "every choice of a node is forbidden",
                where=f"problem {self.problem.name!r}, node {self.problem.nodes[node].name!r}",
                why="each has a forbidden cost, or only forbidden pairs, or needs too much memory",
                todo="allow more layouts, or more memory",
            )
        self.kept[node] = self.kept[node][keep]
        self.cost[node] = self.cost[node][keep]
        self.memory[node] = self.memory[node][keep]
        for other, matrix in self.edges[node].items():
            self.edges[node][other] = matrix = matrix[keep]
            self.edges[other][node] = matrix.T

    def remove(self, node: int) -> dict[int, Array]:
        """Takes the node out, its memory into `base`; returns its matrices by neighbour."""
        low, high = self.span[node]
        self.base[low:high] += self.memory[node].max()
        self.alive.remove(node)
        matrices, self.edges[node] = self.edges[node], {}
        for other in matrices:
            del self.edges[other][node]
        return matrices


@dataclass(frozen=True)
class _Gone:
    """An eliminated node: its best choice is read off once its neighbours have chosen."""

    node: int
    kept: NDArray[np.int64]
    cost: Array
    neighbours: tuple[tuple[int, NDArray[np.int64], Array], ...]  # node, its choices then, matrix

    def choose(self, choice: list[int]) -> int:
        total = self.cost
        for other, kept, matrix in self.neighbours:
            total = total + matrix[:, np.searchsorted(kept, choice[other])]
        return int(self.kept[np.argmin(total)])


def merge_parallel(work: _Work, a: int, b: int, matrix: Array) -> None:
    """Adds a matrix to an edge, new or there: both are paid for the same pair of choices."""
    if b in work.edges[a]:
        matrix = work.edges[a][b] + matrix
    work.edges[a][b] = matrix
    work.edges[b][a] = matrix.T


def forbid(work: _Work, nodes: Sequence[int]) -> None:
    """Drops forbidden choices (arc consistency): one whose every partner at some neighbour is
    forbidden is in no allowed solution.
    """
    pending = set(nodes) & work.alive
    while pending:
        node = pending.pop()
        keep = np.isfinite(work.cost[node])
        for matrix in work.edges[node].values():
            keep &= np.isfinite(matrix).any(axis=1)
        if not keep.all():
            work.restrict(node, keep)
            pending |= set(work.edges[node])


def fold_separable(work: _Work, a: int, b: int) -> bool:
    """Removes an edge whose matrix is x_i + y_j: that is paid just as well at its two nodes."""
    matrix = work.edges[a][b]
    # From its least entry on, every row and column only adds: nothing cancels.
    i, j = np.unravel_index(np.argmin(matrix), matrix.shape)
    row, column = matrix[:, j], matrix[i] - matrix[i, j]
    if not (np.isfinite(row).all() and np.isfinite(column).all()):
        return False
    rounding = 4 * np.finfo(np.float64).eps * np.abs(matrix)
    if not (np.isfinite(matrix) & (np.abs(matrix - row[:, None] - column) <= rounding)).all():
        return False
    work.cost[a] = work.cost[a] + row
    work.cost[b] = work.cost[b] + column
    del work.edges[a][b], work.edges[b][a]
    return True


def eliminate(work: _Work) -> None:
    """Eliminates nodes of degree 0, 1 and 2 whose memory does not depend on their choice: the best
    choice of such a node is a function of its neighbours' (R0, R1, R2), and its least cost becomes
    a constant, a cost of its neighbour, or a matrix between its two neighbours.
    """
    pending = {node for node in work.alive if len(work.edges[node]) <= 2}
    while pending:
        node = pending.pop()
        if node not in work.alive or len(work.edges[node]) > 2 or not work.memory_free(node):
            continue
        matrices = work.remove(node)
        cost = work.cost[node]
        record = tuple((other, work.kept[other], matrix) for other, matrix in matrices.items())
        work.undo.append(_Gone(node, work.kept[node], cost, record))
        touched = tuple(matrices)
        if not touched:
            work.constant += float(cost.min())
        elif len(touched) == 1:
            work.cost[touched[0]] = work.cost[touched[0]] + (
                matrices[touched[0]] + cost[:, None]
            ).min(0)
        else:
            a, b = touched
            merge_parallel(work, a, b, _through(matrices[a].T, cost, matrices[b]))
            forbid(work, touched)
            fold_separable(work, a, b)
        pending |= {other for other in touched if len(work.edges[other]) <= 2}


def _through(left: Array, cost: Array, right: Array) -> Array:
    """Min-plus product: min over k of left[i, k] + cost[k] + right[k, j], shape (i, j).

    Loops over the shortest of the three dimensions, so that the arrays inside stay in the cache.
    """
    rows, middle = left.shape
    columns = right.shape[1]
    if columns < min(rows, middle):
        transposed: Array = _through(right.T, cost, left.T).T
        return transposed
    if rows < middle:
        priced = cost[:, None] + right
        return np.stack([(line[:, None] + priced).min(0) for line in left])
    priced = left + cost
    best: Array = np.add.outer(priced[:, 0], right[0])
    for k in range(1, middle):
        np.minimum(best, np.add.outer(priced[:, k], right[k]), out=best)
    return best


def restrict_memory(work: _Work) -> bool:
    """Drops choices that do not fit even if all others take their least memory, and finds the times
    at which memory can bind: where all choices fit at their most, no choice matters.

    Returns whether anything was dropped or some time no longer binds.

    Raises:
        InfeasibleError: the least memory of all exceeds the limit at some time.
    """
    if work.limit is None or not len(work.times):
        return False
    alive = sorted(work.alive)
    least = _profile(work, {node: work.memory[node].min() for node in alive})
    if least.max() > work.limit * (1 + 1e-12):  # as below
        raise too_little_memory(work.problem, float(least.max()), "at least ")
    dropped = False
    for node in alive:
        low, high = work.span[node]
        if low == high:
            continue
        memory = work.memory[node]
        room = work.limit - least[low:high].max() + memory.min()
        keep = memory <= room + 1e-12 * work.limit  # rounding must not drop what just fits
        if not keep.all():
            work.restrict(node, keep)
            dropped = True
    before = work.binds
    work.binds = _profile(work, {node: work.memory[node].max() for node in alive}) > work.limit
    if dropped:
        forbid(work, alive)
    return dropped or bool((before & ~work.binds).any())


def too_little_memory(problem: Problem, peak: float, qualifier: str = "") -> InfeasibleError:
    """Returns the error to raise when no choice fits, with the least attainable peak in bytes."""
    limit = problem.memory_limit
    return InfeasibleError(
        "no choice fits in memory",
        where=f"problem {problem.name!r}",
        why=f"least attainable peak: {qualifier}{peak:.6g} bytes, limit: {limit:.6g} bytes",
        todo="use more devices, a smaller batch, state sharding or recomputation",
    )


def _profile(work: _Work, memory: dict[int, float]) -> Array:
    """Bytes at each critical time if every node holds what `memory` says, eliminated ones too."""
    return work.base + held_at([work.span[node] for node in memory], memory.values(), work.times)


def held_at(
    spans: Iterable[tuple[int, int]], amounts: Iterable[float], times: NDArray[np.int64]
) -> Array:
    """Returns the sum of the amounts at each time, given the range of times each is held for."""
    change = np.zeros(len(times) + 1)
    for (low, high), amount in zip(spans, amounts, strict=True):
        change[low] += amount
        change[high] -= amount
    return np.cumsum(change)[:-1]


def spans_of(problem: Problem, times: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Returns for every node the range of positions in `times` at which it is live."""
    bounds = np.searchsorted(times, [node.live for node in problem.nodes]).tolist()
    return [(low, high) for low, high in bounds]


def dominate(work: _Work, node: int) -> bool:
    """Drops choices that are never better than another one, whatever the neighbours choose, and
    hold no less memory: swapping in the other one keeps any solution valid and raises no cost.
    """
    cost, memory = work.cost[node], work.memory[node]
    heavier = memory[:, None] >= memory[None, :]
    if work.memory_free(node):
        heavier = np.ones_like(heavier)
    np.fill_diagonal(heavier, False)
    keep = np.ones(len(cost), dtype=bool)
    for i in range(len(cost)):
        others = np.flatnonzero(heavier[i] & keep)
        excess = cost[i] - cost[others]  # the least by which i costs more than each of the others
        for matrix in work.edges[node].values():
            if not len(others):
                break
            allowed = np.isfinite(matrix[i])
            excess += (matrix[i, allowed] - matrix[np.ix_(others, allowed)]).min(axis=1)
            others, excess = others[excess > -np.inf], excess[excess > -np.inf]
        keep[i] = not bool((excess >= 0).any())
    if keep.all():
        return False
    work.restrict(node, keep)
    forbid(work, (node, *work.edges[node]))
    return True


def _finish(work: _Work) -> tuple[Problem, Callable[[Sequence[int]], tuple[int, ...]]]:
    problem, order = work.problem, sorted(work.alive)
    position = {node: index for index, node in enumerate(order)}
    nodes = [
        Choices(
            problem.nodes[node].name,
            tuple(problem.nodes[node].labels[index] for index in work.kept[node]),
            tuple(work.cost[node].tolist()),
            tuple(work.memory[node].tolist()),
            problem.nodes[node].live,
        )
        for node in order
    ]
    edges = [
        Edge(position[a], position[b], matrix)
        for a in order
        for b, matrix in work.edges[a].items()
        if a < b
    ]
    nodes += _remains(work)
    kept, undo = list(work.kept), tuple(reversed(work.undo))

    def expand(choice: Sequence[int]) -> tuple[int, ...]:
        full = [-1] * len(problem.nodes)
        for node, index in zip(order, choice, strict=False):  # what remains of others comes last
            full[node] = int(kept[node][index])
        for gone in undo:
            full[gone.node] = gone.choose(full)
        return tuple(full)

    return Problem(problem.name, tuple(nodes), tuple(edges), problem.memory_limit), expand


def _remains(work: _Work) -> list[Choices]:
    """Nodes of one choice for the cost and, where memory binds, the bytes of eliminated nodes."""
    remains = []
    if work.constant:
        remains.append(Choices("eliminated: cost", ("all",), (work.constant,), (0.0,), (0, 0)))
    held = np.where(work.binds, work.base, 0.0)
    starts = np.flatnonzero(np.diff(held, prepend=0.0))
    for start, end in pairwise([*starts, len(held)]):
        if held[start]:
            live = int(work.times[start]), int(work.times[end - 1]) + 1
            remains.append(Choices("eliminated: memory", ("all",), (0.0,), (held[start],), live))
    return remains


def infinite(cost: Array) -> Array:
    """Returns the costs with everything forbidden infinite."""
    return np.where(cost >= FORBIDDEN, np.inf, cost)

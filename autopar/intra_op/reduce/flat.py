"""A problem as flat arrays, the form in which it is reduced and solved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.intra_op.problem import FORBIDDEN, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Flat:
    """Arrays of a problem; forbidden costs are infinite.

    Args:
        start: index of each node's first choice, (nodes + 1,).
        cost: seconds of every choice.
        ends: the two nodes of every edge, (edges, 2).
        place: index of each edge's matrix, (edges + 1,).
        matrix: all matrices, row-major; rows are choices of the first end.
        span: node, first time and end of each piece of memory, (pieces, 3).
        held: index of each piece's bytes, (pieces + 1,).
        nbytes: bytes of every choice in every piece.
        base: bytes held in any case, (times,).
        limit: bytes; infinite without a limit.
        total: seconds paid in any case.
    """

    start: Ints
    cost: Floats
    ends: Ints
    place: Ints
    matrix: Floats
    span: Ints
    held: Ints
    nbytes: Floats
    base: Floats
    limit: float
    total: float

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.start) - 1

    def price(self, choice: Ints) -> float:
        """Returns the seconds of a choice, infinite if it takes something forbidden."""
        paid = math.fsum(self.cost[self.start[:-1] + choice].tolist())
        columns = np.diff(self.start)[self.ends[:, 1]]
        pairs = choice[self.ends[:, 0]] * columns + choice[self.ends[:, 1]]
        return self.total + paid + math.fsum(self.matrix[self.place[:-1] + pairs].tolist())

    def holds(self, choice: Ints) -> Floats:
        """Returns the bytes of a choice at each time."""
        change = np.zeros(len(self.base) + 1)
        amounts = self.nbytes[self.held[:-1] + choice[self.span[:, 0]]]
        np.add.at(change, self.span[:, 1], amounts)
        np.subtract.at(change, self.span[:, 2], amounts)
        return self.base + np.cumsum(change)[:-1]

    def weighed(self, rates: Floats) -> Floats:
        """Returns for every choice the sum of the bytes of its pieces, each times its rate."""
        lengths = np.diff(self.held)
        owner = np.repeat(self.start[self.span[:, 0]] - self.held[:-1], lengths)
        owner += np.arange(len(owner))
        paid = np.repeat(rates, lengths) * self.nbytes
        return np.bincount(owner, paid, len(self.cost)).astype(np.float64)

    def priced(self, prices: Floats) -> Floats:
        """Returns the cost of every choice, with its bytes at every time at a price."""
        paid = np.append(0.0, np.cumsum(prices))
        return self.cost + self.weighed(paid[self.span[:, 2]] - paid[self.span[:, 1]])

    def table(self) -> Floats:
        """Returns the bytes of every choice at every time, shape (choices, times)."""
        table = np.zeros((len(self.cost), len(self.base)))
        for (node, low, high), begin, end in zip(
            self.span.tolist(), self.held[:-1].tolist(), self.held[1:].tolist(), strict=True
        ):
            rows = slice(self.start[node], self.start[node + 1])
            table[rows, low:high] += self.nbytes[begin:end, None]
        return table

    def at(self, times: Ints) -> Flat:
        """Returns the problem with memory limited only at these times: a relaxation."""
        low = np.searchsorted(times, self.span[:, 1])
        high = np.searchsorted(times, self.span[:, 2])
        kept = np.flatnonzero(low < high)
        lengths = np.diff(self.held)[kept]
        index = np.repeat(self.held[kept] - offsets(lengths)[:-1], lengths)
        return replace(
            self,
            span=np.column_stack([self.span[kept, 0], low[kept], high[kept]]),
            held=offsets(lengths),
            nbytes=self.nbytes[index + np.arange(len(index))],
            base=self.base[times],
        )

    def size(self) -> str:
        """Numbers of nodes, choices and allowed pairs, as text."""
        pairs = int((self.matrix < np.inf).sum())
        return f"{self.nodes} nodes, {len(self.cost)} choices, {pairs} pairs"


def flatten(problem: Problem) -> Flat:
    """Returns a problem's arrays, with its critical times; no times without a limit."""
    sizes = np.array([len(node.cost) for node in problem.nodes], dtype=np.int64)
    limit = math.inf if problem.memory_limit is None else problem.memory_limit
    times = critical_times(problem) if limit < math.inf else np.zeros(0, dtype=np.int64)
    held = [(v, *piece) for v, node in enumerate(problem.nodes) for piece in node.held]
    owner = np.array([v for v, _, _ in held], dtype=np.int64)
    spans = np.searchsorted(times, np.array([live for _, live, _ in held]).reshape(-1, 2))
    live = np.flatnonzero(spans[:, 0] < spans[:, 1])
    return Flat(
        offsets(sizes),
        infinite(_joined(node.cost for node in problem.nodes)),
        np.array([(edge.a, edge.b) for edge in problem.edges], dtype=np.int64).reshape(-1, 2),
        offsets([edge.cost.size for edge in problem.edges]),
        infinite(_joined(edge.cost.ravel() for edge in problem.edges)),
        np.column_stack([owner[live], spans[live]]),
        offsets(sizes[owner[live]]),
        _joined(held[k][2] for k in live),
        np.zeros(len(times)),
        limit,
        0.0,
    )


def _joined(parts: Iterable[object]) -> Floats:
    arrays = [np.asarray(part, dtype=np.float64) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0)


def offsets(sizes: Iterable[int] | Ints) -> Ints:
    """Returns the start of each of several runs of these lengths, and the end of the last."""
    lengths = np.asarray(sizes if isinstance(sizes, np.ndarray) else list(sizes), dtype=np.int64)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def infinite(cost: Floats) -> Floats:
    """Returns the costs with forbidden ones made infinite."""
    return np.where(cost >= FORBIDDEN, np.inf, cost)


def critical_times(problem: Problem) -> Ints:
    """Returns the increasing times at which the set of live nodes is maximal, shape (times,).

    Memory that fits at these times fits at all times: between two of them nodes first end and then
    start, so that the live nodes are a subset of those at one of the two.
    """
    lives = [live for node in problem.nodes for live, _ in node.held if live[0] < live[1]]
    ends = np.unique(np.array([end for _, end in lives], dtype=np.int64))
    starts = np.unique(np.array([start for start, _ in lives], dtype=np.int64))
    if not len(starts):
        return starts
    # A start is critical if some node ends after it and not after the next start.
    following = np.append(starts[1:], ends[-1])
    index = np.searchsorted(ends, starts, side="right")
    return starts[ends[index] <= following]

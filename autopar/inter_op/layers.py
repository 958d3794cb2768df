"""Groups a model's operators into layers, the units from which stages are built.

Each repeated block is a layer. Operators between blocks join a neighbouring layer if they are
light; otherwise they form one or more layers of their own, so that a heavy embedding or head is
balanced like any other layer. A model without repeated blocks is clustered as in Alpa (OSDI 2022,
section 5.3): into a given number of layers, none above (1 + slack) times the mean weight, with the
fewest bytes between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import GraphError
from autopar.ir.graph import Graph, Node

Floats = NDArray[np.float64]

# A segment joins a neighbour if it weighs less than this fraction of a layer.
_LIGHT = 0.1
# Default number of layers for a model without repeated blocks.
_LAYERS = 16
# A value that depends on no parameter and weighs less than this fraction of the model is recomputed
# where it is needed instead of being sent.
_CHEAP = 0.01
# Bytes take precedence; ties are broken in favour of evenly sized layers.
_EVEN = 1e-6


@dataclass(frozen=True)
class Layers:
    """A partition of a graph's operators into contiguous layers.

    Attributes:
        ends: the last operator of every layer, never an `autopar.share`, which other graphs lack.
        weights: seconds or FLOPs of every layer.
        forward: bytes of one microbatch's values that cross each border between two layers: every
            value read after the border, skip connections included, except inputs, parameters and
            values that are cheap to recompute.
        backward: the same for gradients.
        kinds: layers with equal kinds are identical.
    """

    ends: tuple[str, ...]
    weights: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    kinds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ends)


def find_layers(
    graph: Graph,
    weights: Mapping[str, float],
    count: int | None = None,
    slack: float = 0.5,
    most: int = 128,
    by_blocks: bool = False,
) -> Layers:
    """Divides a graph into layers.

    Args:
        graph: the graph, with its repeats, if any.
        weights: seconds or FLOPs of operators; missing ones weigh nothing.
        count: number of layers; None for the repeated blocks plus the layers around them, at most
            16 for a model without blocks, fewer where operators are too heavy.
        slack: fraction of the mean by which a clustered layer may exceed it (Alpa's delta).
        most: maximum number of layers; repeated blocks are merged if there are more.
        by_blocks: whether repeated blocks are layers even if they weigh less than the rest, as in a
            graph that has fewer blocks than its model.

    Raises:
        GraphError: the graph has no operator, or fewer than `count`.
    """
    row = _Row(graph, weights)
    if not row.nodes:
        raise GraphError(
            f"{graph.name} has no operator", todo="give a graph that computes something"
        )
    if count is not None and not 1 <= count <= len(row.nodes):
        raise GraphError(
            f"{graph.name} cannot be cut into {count} layers",
            why=f"it has {len(row.nodes)} operators",
            todo="ask for fewer layers",
        )
    if count is None and (blocks := row.blocks(most, by_blocks)):
        return row.layers(row.around(blocks, slack))
    exact = count is not None
    return row.layers(row.clustered(0, len(row.nodes), count or _LAYERS, slack, exact))


def layers_at(graph: Graph, weights: Mapping[str, float], ends: Sequence[str]) -> Layers:
    """Divides a graph into layers with the given last operators.

    Args:
        graph: the graph, with its repeats, if any.
        weights: seconds or FLOPs of operators; missing ones weigh nothing.
        ends: in execution order; the last one is the graph's last operator.

    Raises:
        GraphError: an end is not an operator, or the ends are out of order.
    """
    row = _Row(graph, weights)
    places = [row.place.get(name, -1) + 1 for name in ends]
    if not places or sorted({*places, len(row.nodes)} - {0}) != places:
        raise GraphError(
            f"{graph.name} cannot be cut into layers there",
            why=f"the ends are {', '.join(ends)}",
            todo="name operators in the order in which they run, the last one last",
        )
    return row.layers(places)


class _Row:
    """The operators of a graph as arrays, without `autopar.share`s."""

    def __init__(self, graph: Graph, weights: Mapping[str, float]) -> None:
        self.graph = graph
        self.nodes = [
            node for node in graph.nodes if not node.is_leaf and node.op != "autopar.share"
        ]
        self.place = {node.name: at for at, node in enumerate(self.nodes)}
        self.weights = np.array([float(weights.get(node.name, 0.0)) for node in self.nodes])
        self.sums = np.concatenate([[0.0], np.cumsum(self.weights)])
        self.forward, self.backward = self._crossing()

    def _crossing(self) -> tuple[Floats, Floats]:
        """Returns [operators + 1] bytes of values and gradients that cross before each one."""
        graph, size = self.graph, len(self.nodes)
        last: dict[str, int] = {}  # position of the last reader of each value
        for node in reversed(graph.nodes):
            readers = graph.users[node.name]  # a share is read where its readers are
            reads = [self.place[user] if user in self.place else last[user] for user in readers]
            last[node.name] = max(reads, default=self.place.get(node.name, -1))
        cheap = self._cheap()
        forward, backward = np.zeros(size + 1), np.zeros(size + 1)
        for at, node in enumerate(self.nodes):
            if node.name in cheap or (node.alias is not None and self._sent_anyway(node, last)):
                continue
            nbytes = float(sum(t.nbytes for t in node.types)) if len(node.types) == 1 else 0.0
            forward[at + 1 : last[node.name] + 1] += nbytes
            if node.requires_grad:
                backward[at + 1 : last[node.name] + 1] += nbytes
        return forward, backward

    def _sent_anyway(self, node: Node, last: Mapping[str, int]) -> bool:
        """Returns whether the base value of a view crosses every border that the view crosses."""
        assert node.alias is not None
        base = self.graph[node.alias]
        return (
            not base.is_leaf
            and len(base.types) == 1
            and last[base.name] >= last[node.name]
            and base.type.nbytes >= node.type.nbytes
        )

    def _cheap(self) -> set[str]:
        """Returns the values computed from inputs and buffers alone at negligible cost."""
        total = float(self.sums[-1])
        cost: dict[str, float] = {}
        for node in self.graph.nodes:
            if node.is_leaf:
                if node.op != "param":
                    cost[node.name] = 0.0
            elif not node.requires_grad and all(name in cost for name in node.inputs):
                at = self.place.get(node.name)
                own = 0.0 if at is None else float(self.weights[at])
                cost[node.name] = own + sum(cost[name] for name in dict.fromkeys(node.inputs))
        return {name for name, seconds in cost.items() if seconds <= _CHEAP * total}

    def blocks(self, most: int, by_blocks: bool) -> list[tuple[int, int]]:
        """Returns [start, stop) of the repeated blocks if they dominate the model, else none.

        With `by_blocks` their weight does not matter.
        """
        found: list[tuple[int, int]] = []
        total = sum(repeat.count for repeat in self.graph.repeats)
        for repeat in self.graph.repeats:
            stops = [
                1 + max(self.place[name] for name in block if name in self.place)
                for block in repeat.iterations
            ]
            starts = [min(self.place[n] for n in repeat.iterations[0] if n in self.place), *stops]
            together = -(-total // most)
            for at in range(0, repeat.count, together):
                found.append((starts[at], stops[min(at + together, repeat.count) - 1]))
        covered = sum(self.sums[stop] - self.sums[start] for start, stop in found)
        dominate = by_blocks or covered >= self.sums[-1] / 2
        return found if dominate and len(found) > 1 else []

    def around(self, blocks: list[tuple[int, int]], slack: float) -> list[int]:
        """Returns the ends of layers built around blocks; light segments in between join them."""
        mean = sum(float(self.sums[b] - self.sums[a]) for a, b in blocks) / len(blocks)
        ends: list[int] = []
        at = 0
        for start, stop in [*blocks, (len(self.nodes), len(self.nodes))]:
            weight = float(self.sums[start] - self.sums[at])
            if start > at and weight >= _LIGHT * mean:
                parts = min(start - at, max(1, round(weight / mean)))
                ends += self.clustered(at, start, parts, slack)
            elif start > at and start == len(self.nodes) and ends:
                ends[-1] = start  # a light tail of the model joins the last block
            if stop > start:
                ends.append(stop)
            at = stop
        return ends

    def clustered(
        self, start: int, stop: int, count: int, slack: float, exact: bool = False
    ) -> list[int]:
        """Clusters the operators from `start` to before `stop`; returns the ends of their layers.

        It chooses the division into `count` layers, or as many as possible, with the fewest bytes
        between layers. No layer weighs more than (1 + slack) times the mean,
        unless a single operator does, nor less than (1 - slack) times the mean of `count` layers.
        With `exact` there are exactly `count` layers, some of which may weigh less.
        """
        sums = self.sums[start : stop + 1] - self.sums[start]
        crossing = (self.forward + self.backward)[start : stop + 1].copy()
        crossing[0] = crossing[-1] = 0.0
        crossing /= float(crossing.max()) or 1.0
        for at in range(1, stop - start):  # the results of one operator stay together
            if self.nodes[start + at].op == "getitem":
                crossing[at] = np.inf
        least = 0.0 if exact else (1 - slack) * float(sums[-1]) / count
        for number in range(min(count, stop - start), 0, -1):
            limit = _limit(sums, number, (1 + slack) * float(sums[-1]) / number)
            ends = _cluster(sums, crossing, number, limit, least)
            if ends:
                return [start + end for end in ends]
        raise GraphError(f"the operators of {self.graph.name} cannot be clustered")

    def layers(self, ends: list[int]) -> Layers:
        """Builds the layers that end before the given positions."""
        starts = [0, *ends[:-1]]
        numbers: dict[tuple[str, ...], int] = {}
        kinds = []
        for start, stop in zip(starts, ends, strict=True):
            looks = tuple(self.graph.template[node.name] for node in self.nodes[start:stop])
            kinds.append(numbers.setdefault(looks, len(numbers)))
        return Layers(
            tuple(self.nodes[end - 1].name for end in ends),
            tuple(float(self.sums[b] - self.sums[a]) for a, b in zip(starts, ends, strict=True)),
            tuple(float(self.forward[end]) for end in ends[:-1]),
            tuple(float(self.backward[end]) for end in ends[:-1]),
            tuple(kinds),
        )


def _cluster(
    sums: Floats, crossing: Floats, count: int, most: float, least: float
) -> list[int]:  # fmt: skip
    """Returns the ends of `count` parts with the fewest bytes between them, empty if infeasible.

    Args:
        sums: prefix sums of the operators' weights.
        crossing: bytes at each position.
        count: number of parts.
        most, least: bounds on the weight of a part.
    """
    size, mean = len(sums) - 1, float(sums[-1]) / count
    best = np.full((count + 1, size + 1), np.inf)
    came = np.zeros((count + 1, size + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for part in range(1, count + 1):
        for end in range(part, size + 1):
            low = max(part - 1, int(np.searchsorted(sums, sums[end] - most)))
            high = min(end, int(np.searchsorted(sums, sums[end] - least, side="right")))
            if low < high:
                weight = (sums[end] - sums[low:high]) / mean if mean else end - np.arange(low, high)
                total = best[part - 1, low:high] + _EVEN * weight**2
                at = int(total.argmin())
                best[part, end] = total[at] + crossing[end]
                came[part, end] = low + at
    if best[count, size] == np.inf:
        return []
    ends = [size]
    for part in range(count, 1, -1):
        ends.append(int(came[part, ends[-1]]))
    return ends[::-1]


def _limit(sums: Floats, count: int, wished: float) -> float:
    """Returns the smallest limit, at least `wished`, that `count` layers can satisfy."""

    def parts(limit: float) -> int:
        number, at = 0, 0
        while at < len(sums) - 1:
            after = int(np.searchsorted(sums, sums[at] + limit * (1 + 1e-12), side="right")) - 1
            if after <= at:
                return len(sums)
            number, at = number + 1, after
        return number

    if parts(wished) <= count:
        return wished * (1 + 1e-9)
    low, high = wished, float(sums[-1])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if parts(middle) <= count else (middle, high)
    return high * (1 + 1e-9)

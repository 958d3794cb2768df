"""Prices the parts of a published system's step by autopar's cost model, in seconds and bytes.

    model --capture, plan under pins--> kernels and collectives of one microbatch
          --the system's fusions-->     seconds before, in and after a repeated block

A model of two layers is enough, because the price of a block is multiplied by the number of layers.
Kernels are those of `works`, and collectives those of the plan, both in the order of the
simulator's tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.cost.model import AnalyticModel, NodeWork, Work
from autopar.intra_op.pins.pin_functions import PinsLike
from autopar.intra_op.work.kernel_work import fused, works
from autopar.ir.collective import Collective
from autopar.ir.executed.library_kernels import base
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import tasks
from autopar.stage_plan import StagePlan

Works = dict[str, NodeWork]
PRODUCTS = ("linear", "matmul", "scaled_dot_product_attention", "embedding")


@dataclass
class Pass:
    """Seconds of one direction: kernels, collectives of activations and of parameters."""

    kernels: float = 0.0
    calls: float = 0.0
    states: float = 0.0

    @property
    def seconds(self) -> float:
        """Kernels and the collectives of activations, one after another."""
        return self.kernels + self.calls


@dataclass
class Part:
    """Seconds of a part of the model for one microbatch."""

    forward: Pass = field(default_factory=Pass)
    backward: Pass = field(default_factory=Pass)

    @property
    def seconds(self) -> float:
        """Both directions."""
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True)
class Captured:
    """A model under a plan.

    Attributes:
        graph, plan: of two or more layers.
        works: kernels by node, before any fusion.
        prices: of the plan's mesh.
    """

    graph: Graph
    plan: StagePlan
    works: Works
    prices: AnalyticModel

    def nbytes(self, name: str) -> float:
        """Returns the bytes of a value on one device, in the layout in which it is produced."""
        node = self.graph[name]
        layout = self.plan.nodes[self.graph.template[name]].results[0][1]
        return float(layout.local_bytes(node.type, self.plan.mesh))

    @property
    def block(self) -> tuple[Node, ...]:
        """The nodes of the first block."""
        return tuple(self.graph[name] for name in self.graph.repeats[0].iterations[0])


def captured(
    model: nn.Module, inputs: dict[str, Any], mesh: str, words: PinsLike | None, whole: str = ""
) -> Captured:
    """Capture `model`, plan it under `words` on `mesh`, whatever memory it takes.

    `whole` are all devices of the step, for whose slowest one the others wait.
    """
    options, trace = Options(pins=words, memory=1e16), Trace(None)
    graph = capture_graph(model, (), inputs, options, trace).graph
    plan = make_plan(graph, Mesh.parse(mesh), options, trace)
    prices = AnalyticModel(plan.mesh, in_step=True, whole=Mesh.parse(whole or mesh))
    return Captured(graph, plan, works(graph, plan, options.table), prices)


def parts(
    of: Captured, kernels: Works, price: Callable[[Work], float] | None = None
) -> tuple[Part, Part, Part]:
    """Seconds before the blocks, in one block and after them, for the batch of the graph.

    Args:
        of: the model and its plan.
        kernels: by node, after fusion.
        price: seconds of a kernel; by default the plan's cost model.
    """
    found = (Part(), Part(), Part())
    count = len(of.graph.repeats[0].iterations)
    place = _places(of.graph)
    compute = price or of.prices.compute
    for task in tasks(of.graph, of.plan, kernels, of.prices):
        if task.phase == "optimizer" or not task.node:
            continue
        where = place[task.node]
        part = found[where].forward if task.phase == "forward" else found[where].backward
        share = task.share / count if where == 1 else task.share
        if isinstance(task.what, Collective):
            seconds = share * of.prices.collective(task.what)
            if task.cause in ("parameter", "gradient"):
                part.states += seconds
            else:
                part.calls += seconds
        elif isinstance(task.what, tuple):  # nothing published here is offloaded
            part.kernels += share * sum(map(compute, task.what))
    return found


def _places(graph: Graph) -> dict[str, int]:
    """0, 1 or 2 for every node: before, in and after the blocks; a leaf stands by its reader."""
    inside = {name for repeat in graph.repeats for block in repeat.iterations for name in block}
    found: dict[str, int] = {}
    seen = 0
    for node in graph.nodes:
        if node.name in inside:
            found[node.name] = 1
            seen = 2 if not node.is_leaf else seen
        else:
            found[node.name] = seen
    # Leaves stand first in a graph, and the shares of parameters before what reads them.
    for node in reversed(graph.nodes):
        readers = [found[user] for user in graph.users[node.name]]
        if readers and node.name not in inside and _of_parameter(graph, node):
            found[node.name] = min(readers)
    return found


def _of_parameter(graph: Graph, node: Node) -> bool:
    while node.alias is not None:
        node = graph[node.alias]
    return node.is_leaf


# Fusion ---------------------------------------------------------------------------------------


def chains(of: Captured, patterns: Iterable[Sequence[str]]) -> Iterator[tuple[Node, ...]]:
    """Nodes whose operators stand in a row as in one of the patterns, each read by the next alone.

    ("mul", "softmax") is a product and the softmax that alone reads it.
    """
    for node in of.graph.folded:
        for pattern in patterns:
            row = [node]
            while base(row[-1].op) == pattern[len(row) - 1]:
                if len(row) == len(pattern):
                    yield tuple(row)
                    break
                after = of.graph.users[row[-1].name]
                if len(after) != 1:
                    break
                row.append(of.graph[after[0]])


def regions(of: Captured) -> list[tuple[Node, ...]]:
    """Returns what a compiler makes one kernel: neighbours with no matrix product between them.

    Each operator stands on a level, one above those whose matrix products it needs; operators of a
    level that read one another are one region.
    """
    graph = of.graph
    level: dict[str, int] = {}
    region: dict[str, int] = {}
    members: dict[int, list[Node]] = {}
    for node in graph.folded:
        if node.is_leaf:
            continue
        reads = [n for n in (_behind(graph, name) for name in node.inputs) if not n.is_leaf]
        reads = [n for n in reads if n.name in level]
        level[node.name] = max((level[n.name] + _solid(n) for n in reads), default=0)
        if _solid(node) or node.op == "autopar.share":
            continue
        near = {
            region[n.name] for n in reads if n.name in region and level[n.name] == level[node.name]
        }
        into = min(near, default=len(region) + 1)
        for other in near - {into}:
            for moved in members.pop(other):
                region[moved.name] = into
                members[into].append(moved)
        members.setdefault(into, []).append(node)
        region[node.name] = into
    return [tuple(nodes) for nodes in members.values() if len(nodes) > 1]


def _behind(graph: Graph, name: str) -> Node:
    """The node that computes a value, without the shares between."""
    node = graph[name]
    while node.op == "autopar.share":
        node = graph[node.inputs[0]]
    return node


def _solid(node: Node) -> bool:
    return base(node.op) in PRODUCTS


def fuse(of: Captured, kernels: Works, groups: Iterable[Sequence[Node]]) -> Works:
    """`kernels` with each group of nodes as one kernel in each direction.

    Forwards it reads what comes from outside and writes what is read outside or kept for the
    backward; backwards it reads the gradients of what it wrote and what was kept, computing again
    what was not, and writes the gradients of what it read.
    """
    found = dict(kernels)
    for group in groups:
        names = {node.name for node in group}
        reads = {name for node in group for name in node.inputs if name not in names}
        writes = {n.name for n in group if any(u not in names for u in of.graph.users[n.name])}
        extra = sum(
            kernel.nbytes for node in group for kernel in _kept(of, node, kernels[node.name])
        )
        kept = {name for node in group for name in node.saved}
        if kept & (names - writes):  # not written: computed again from what was read
            kept |= {name for name in reads if of.graph[name].requires_grad}
        kept &= reads | writes
        forward = [work for node in group for work in kernels[node.name].forward]
        backward = [work for node in group for work in kernels[node.name].backward]
        whole = sum(map(of.nbytes, (*reads, *writes))) + extra
        gradients = [name for name in (*reads, *writes) if of.graph[name].requires_grad]
        back = sum(map(of.nbytes, (*gradients, *kept))) + extra
        last = group[-1].name
        for node in group:
            found[node.name] = NodeWork()
        found[last] = NodeWork(
            (fused(forward, whole),) if forward else (),
            (fused(backward, back),) if backward else (),
        )
    return found


def _kept(of: Captured, node: Node, made: NodeWork) -> Iterator[Work]:
    """Yields a kernel with the bytes that a node keeps in addition to its operands and results."""
    if not node.saved_types or not made.forward:
        return
    operands = sum(map(of.nbytes, node.inputs))
    beside = sum(work.nbytes for work in made.forward) - operands - of.nbytes(node.name)
    yield replace(made.forward[0], nbytes=max(beside, 0.0))


def merged(of: Captured, kernels: Works) -> Works:
    """`kernels` with linears that read the same value as one product, as query, key and value are.

    Forwards and for the weights their columns stand side by side, for the input they are summed
    over; the kernels that would add the gradients of the input are gone.
    """
    found = dict(kernels)
    readers: dict[str, list[Node]] = {}
    for node in of.graph.folded:
        if base(node.op) == "linear":
            readers.setdefault(node.inputs[0], []).append(node)
    for source, group in readers.items():
        if len(group) < 2:
            continue
        made = [kernels[node.name] for node in group]
        forward = [_joined([work.forward[0] for work in made], "n")]
        # The gradient of the input is a sum over all columns, those of weights stand beside.
        lengths = ("k", "n", "n")
        columns = zip(*(work.backward for work in made), strict=True)
        backward = [
            _joined(column, length) for column, length in zip(columns, lengths, strict=False)
        ]
        for node in group:
            found[node.name] = NodeWork()
        found[group[0].name] = NodeWork(tuple(forward), tuple(backward))
        if of.graph[source].op == "autopar.share":
            others = len(of.graph.users[source]) - len(group)
            kept = kernels[source].backward[: max(others, 0)]
            found[source] = NodeWork((), kept)
    return found


def _joined(column: Sequence[Work], longer: str) -> Work:
    """Products that share an operand as one that is as long in `longer` as all of them."""
    flops = sum(work.flops for work in column)
    nbytes = sum(work.nbytes for work in column)
    gemms = [work.gemm for work in column if work.gemm is not None]
    gemm = None
    if gemms:
        lengths: dict[str, int] = {longer: sum(getattr(gemm, longer) for gemm in gemms)}
        gemm = replace(gemms[0], **lengths)
    return replace(column[0], flops=flops, nbytes=nbytes, gemm=gemm)


__all__ = [
    "Captured", "Part", "Pass", "Works", "captured", "chains", "fuse", "merged", "parts",
    "regions",
]  # fmt: skip

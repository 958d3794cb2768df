"""Graph x strategies x prices -> Problem; Solution -> the layouts of a plan.

One problem node stands for one node of the folded graph, priced forwards and backwards and times
the number of blocks it stands for; a parameter and its share are one node, "stored => used", whose
cost is the resharding between the two (data parallelism's all_reduce, ZeRO-3's all_gather and
reduce_scatter) and whose memory is exact. Edges are reshardings. Memory is what is alive at the end
of the forward: parameters, gradients, optimizer state and saved activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.cost.model import CostModel, Work
from autopar.errors import UnknownOperatorError
from autopar.intra_op.problem import Choices, Edge, Problem
from autopar.intra_op.rule import OpRule, Signature, resolve
from autopar.intra_op.strategy import strategies
from autopar.ir.collective import Resharder
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.plan import NodePlan

MATMULS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention")


@dataclass(frozen=True)
class Option:
    """One choice of one problem node: the layouts it gives each IR node it stands for."""

    label: str
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    share: float
    stored: Layout | None = None


@dataclass(frozen=True)
class Built:
    """A Problem and what its choices mean.

    Attributes:
        problem: the strategy problem.
        names: IR node of each problem node (a parameter's share stands for both).
        options: the meaning of each choice.
        replicated: operators that run whole for want of a rule.
    """

    problem: Problem
    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    replicated: tuple[str, ...]


def operand_types(graph: Graph, node: Node) -> tuple[TensorType, ...]:
    """Types of the tensors a node reads, in argument order."""
    return tuple(graph[name].type for name in node.inputs)


def whole_options(graph: Graph, node: Node) -> tuple[Option, ...]:
    """The only choice of an input, a buffer or an operator without a rule: whole everywhere."""
    operands = tuple(Layout.replicated(len(t.shape)) for t in operand_types(graph, node))
    results = tuple(Layout.replicated(len(t.shape)) for t in node.types)
    return (Option("whole", operands, results, 1.0),)


def parameter_options(tensor: TensorType, mesh: Mesh, grad: bool) -> Iterator[Option]:
    """Every "stored => used" of a parameter.

    Along each axis it is stored whole and used whole or varying, or stored split and used split or
    gathered.
    """
    dims = range(len(tensor.shape))
    kinds: list[tuple[int | None, str]] = [(None, "R"), *((d, "S") for d in dims)]
    if grad:
        kinds += [(None, "V"), *((d, "V") for d in dims)]
    axes = [axis.name for axis in mesh.axes if axis.size > 1]
    for combination in itertools.product(kinds, repeat=len(axes)):
        stored: list[tuple[str, ...]] = [()] * len(tensor.shape)
        used: list[tuple[str, ...]] = [()] * len(tensor.shape)
        varying = []
        for axis, (dim, kind) in zip(axes, combination, strict=True):
            if dim is not None:
                stored[dim] = (*stored[dim], axis)
                if kind == "S":
                    used[dim] = (*used[dim], axis)
            if kind == "V":
                varying.append(axis)
        keep, use = Layout(tuple(stored)), Layout(tuple(used), varying=tuple(varying))
        counts = (np.prod([mesh.axis_size(a) for a in split] or [1]) for split in stored)
        if all(size % count == 0 for size, count in zip(tensor.shape, counts, strict=True)):
            label = f"{keep.format(tensor.shape)} => {use.format(tensor.shape)}"
            yield Option(label, (keep,), (use,), 1.0, stored=keep)


class Builder:
    """Collects the nodes and edges of one Problem; `build` is its only use."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        model: CostModel,
        table: dict[str, OpRule],
        state_bytes: float,
        unknown_ops: str,
    ) -> None:
        self.graph, self.mesh, self.model, self.table = graph, mesh, model, table
        self.state_bytes, self.unknown_ops = state_bytes, unknown_ops
        self.resharder = Resharder(mesh, model.collective)
        self.choices: list[Choices] = []
        self.options: list[tuple[Option, ...]] = []
        self.names: list[str] = []
        self.position: dict[str, int] = {}
        self.replicated: list[str] = []
        self.savers = self._first_savers()

    def _first_savers(self) -> dict[tuple[str, str], bool]:
        """(saver, value) pairs that pay for a saved value: one payer for each piece of storage."""
        paid: set[str] = set()
        payers: dict[tuple[str, str], bool] = {}
        for node in self.graph.folded:
            for value in node.saved:
                root = self._storage(value)
                payers[node.name, value] = root not in paid and self.graph[root].op != "param"
                paid.add(root)
        return payers

    def _storage(self, value: str) -> str:
        alias = self.graph[value].alias
        while alias is not None:
            value, alias = alias, self.graph[alias].alias
        return value

    def add(self, node: Node) -> None:
        """One operator, input or buffer."""
        signature: Signature | None = None
        rule = self.table.get(node.op)
        if node.is_leaf:
            options = whole_options(self.graph, node)
        elif rule is None:
            if self.unknown_ops == "error":
                raise UnknownOperatorError(
                    f"{node.op} has no sharding rule",
                    where=str(node.source),
                    todo='add a rule, or pass unknown_ops="replicate" to run it whole',
                )
            self.replicated.append(node.name)
            options = whole_options(self.graph, node)
        else:
            signature = resolve(rule, node, operand_types(self.graph, node), node.types)
            sizes = signature.sizes
            options = tuple(
                Option(str(s), s.operands, s.results, s.share(sizes, self.mesh))
                for s in strategies(signature, self.mesh)
            )
        count = self.graph.multiplicity[node.name]
        flops = signature.flops if signature else float(node.type.numel)
        cost = tuple(count * self._seconds(node, option, flops) for option in options)
        memory = tuple(count * self._saved_bytes(node, option) for option in options)
        self._append(node.name, options, cost, memory)

    def add_parameter(self, node: Node, share: Node) -> None:
        """A parameter and its share as one problem node."""
        options = tuple(parameter_options(node.type, self.mesh, node.requires_grad))
        count = self.graph.multiplicity[node.name]
        cost, memory = [], []
        for option in options:
            stored, used = option.operands[0], option.results[0]
            seconds = self.resharder.cost(node.type, stored, used, node.requires_grad)
            held = stored.local_bytes(node.type, self.mesh)
            copies = 1.0 + (1.0 + self.state_bytes if node.requires_grad else 0.0)
            gathered = used.dims != stored.dims
            extra = used.local_bytes(node.type, self.mesh) if gathered else 0
            cost.append(count * seconds)
            memory.append(count * (held * copies + extra))
        self._append(share.name, options, tuple(cost), tuple(memory))
        self.position[node.name] = self.position[share.name]

    def _append(
        self,
        name: str,
        options: tuple[Option, ...],
        cost: tuple[float, ...],
        memory: tuple[float, ...],
    ) -> None:
        self.position[name] = len(self.choices)
        labels = tuple(option.label for option in options)
        self.choices.append(Choices(name, labels, cost, memory, (0, 1)))
        self.options.append(options)
        self.names.append(name)

    def _seconds(self, node: Node, option: Option, flops: float) -> float:
        """Forward and backward of one operator on one device."""
        views = node.alias is not None or node.is_leaf or node.op.startswith("autopar.")
        if views:
            return 0.0
        types = operand_types(self.graph, node)
        nbytes = sum(
            layout.local_bytes(tensor, self.mesh)
            for layout, tensor in zip(
                (*option.operands, *option.results), (*types, *node.types), strict=True
            )
        )
        matmul = node.op.removeprefix("aten.").split(".")[0] in MATMULS
        passes = 1
        if node.requires_grad:
            wanted = sum(self.graph[name].requires_grad for name in node.inputs[:2])
            passes += wanted if matmul else 1
        work = Work(node.op, flops * option.share, nbytes, node.type.dtype, matmul)
        return passes * self.model.compute(work)

    def _saved_bytes(self, node: Node, option: Option) -> float:
        """Bytes that stay alive for this operator's backward and that nobody else pays for."""
        total = 0.0
        for value in node.saved:
            if not self.savers[node.name, value]:
                continue
            if value == node.name:
                layout = option.results[0]
            else:
                layout = option.operands[node.inputs.index(value)]
            total += layout.local_bytes(self.graph[value].type, self.mesh)
        return total + option.share * sum(t.nbytes for t in node.saved_types)

    def edges(self) -> Iterator[Edge]:
        """One resharding matrix per use of a value."""
        carried = {
            outside: repeat.iterations[0]
            for repeat in self.graph.repeats
            for outside, _ in repeat.carried
        }
        back = {
            entry: (leaving, repeat.count)
            for repeat in self.graph.repeats
            for entry, leaving in repeat.carried
        }
        leaving_share = self._leaving_shares()
        for node in self.graph.folded:
            if node.op == "param":
                continue
            for index, value in enumerate(node.inputs):
                source = self.graph.template[value]
                if self.position[source] == self.position[node.name]:
                    continue
                outside = node.name not in self._inside and source in leaving_share
                if outside:
                    yield self._edge(leaving_share[source], node, index, 1, entering=True)
                    continue
                inside_entry = value in carried and node.name in carried[value]
                count = 1 if inside_entry else self.graph.multiplicity[node.name]
                yield self._edge(source, node, index, count)
                if inside_entry:
                    leaving, times = back[value]
                    yield self._edge(leaving, node, index, times)

    @cached_property
    def _inside(self) -> frozenset[str]:
        return frozenset(n for repeat in self.graph.repeats for n in repeat.iterations[0])

    def _leaving_shares(self) -> dict[str, str]:
        """Value carried out of the last block -> the share in whose layout it is held."""
        found: dict[str, str] = {}
        for repeat in self.graph.repeats:
            for entry, leaving in repeat.carried:
                readers = [n for n in self.graph.users[entry] if n in repeat.iterations[0]]
                found[leaving] = readers[0]
        return found

    def _edge(
        self, source: str, node: Node, index: int, count: int, *, entering: bool = False
    ) -> Edge:
        a, b = self.position[source], self.position[node.name]
        tensor, grad = self.graph[source].type, self.graph[source].requires_grad
        rows = [(o.operands if entering else o.results)[0] for o in self.options[a]]
        columns = [option.operands[index] for option in self.options[b]]
        price: dict[tuple[Layout, Layout], float] = {}
        for pair in itertools.product(dict.fromkeys(rows), dict.fromkeys(columns)):
            price[pair] = self.resharder.cost(tensor, pair[0], pair[1], grad)
        matrix = np.array([[price[row, column] for column in columns] for row in rows])
        return Edge(a, b, count * matrix)


def build(
    graph: Graph,
    mesh: Mesh,
    model: CostModel,
    table: dict[str, OpRule],
    *,
    memory_limit: float | None = None,
    state_bytes: float = 2.0,
    unknown_ops: str = "replicate",
) -> Built:
    """The strategy problem of a graph in which every parameter is read by one share.

    Args:
        graph: normalised, annotated, with its repeats.
        mesh: the devices.
        model: prices, in seconds.
        table: rules by operator.
        memory_limit: bytes per device.
        state_bytes: optimizer state in units of the parameter's own bytes (AdamW: 2).
        unknown_ops: "replicate" or "error".

    Raises:
        UnknownOperatorError: an operator has no rule and `unknown_ops` is "error".
    """
    builder = Builder(graph, mesh, model, table, state_bytes, unknown_ops)
    for node in graph.folded:
        if node.op == "param":
            continue
        if node.op == "autopar.share" and graph[node.inputs[0]].op == "param":
            builder.add_parameter(graph[graph.template[node.inputs[0]]], node)
        else:
            builder.add(node)
    edges = tuple(builder.edges())
    problem = Problem(graph.name, tuple(builder.choices), edges, memory_limit)
    return Built(problem, tuple(builder.names), tuple(builder.options), tuple(builder.replicated))


def layouts(built: Built, graph: Graph, choice: tuple[int, ...]) -> dict[str, NodePlan]:
    """The plan's entries for a choice: node -> its layouts, with shapes."""
    plan: dict[str, NodePlan] = {}
    for name, options, index in zip(built.names, built.options, choice, strict=True):
        node, option = graph[name], options[index]
        shapes = [t.shape for t in operand_types(graph, node)]
        results = tuple(zip((t.shape for t in node.types), option.results, strict=True))
        plan[name] = NodePlan(tuple(zip(shapes, option.operands, strict=True)), results)
        if option.stored is not None:
            stored = graph.template[node.inputs[0]]
            plan[stored] = NodePlan((), ((graph[stored].type.shape, option.stored),))
    return plan

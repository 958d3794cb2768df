"""What one node may choose: layouts of its operands and results, and how a parameter is stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import AnnotationError
from autopar.intra_op.rule import OpRule, Signature, resolve
from autopar.intra_op.strategy import strategies
from autopar.ir.annotation import Annotation
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.plan import NodePlan


@dataclass(frozen=True)
class Option:
    """One choice of one problem node: the layouts it gives each IR node it stands for."""

    label: str
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    share: float
    stored: Layout | None = None

    def entry(self, graph: Graph, node: Node) -> NodePlan:
        """What a plan says of `node` under this choice: its layouts, with shapes."""
        reads = (t.shape for t in operand_types(graph, node))
        gives = (t.shape for t in node.types)
        return NodePlan(
            tuple(zip(reads, self.operands, strict=True)),
            tuple(zip(gives, self.results, strict=True)),
        )


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
        counts = (math.prod(mesh.axis_size(a) for a in split) for split in stored)
        if all(count <= max(size, 1) for size, count in zip(tensor.shape, counts, strict=True)):
            label = f"{keep.format(tensor.shape)} => {use.format(tensor.shape)}"
            yield Option(label, (keep,), (use,), 1.0, stored=keep)


def received_options(node: Node, mesh: Mesh) -> tuple[Option, ...]:
    """The choices of what another stage sent: every layout of splits and wholes."""
    shape = node.type.shape
    free = Annotation(Layout.replicated(len(shape)), tuple(range(len(shape))))
    found = free.layouts(shape, mesh)
    return tuple(Option(layout.format(shape), (), (layout,), 1.0) for layout in found)


def annotated_options(node: Node, mesh: Mesh) -> tuple[Option, ...]:
    """The choices of an `autopar.shard`: the layouts that it allows.

    Raises:
        AnnotationError: it cannot be read or does not fit; names the user's line.
    """
    shape, text = node.type.shape, str(node.args[1])
    try:
        found = tuple(Annotation.parse(text, shape).layouts(shape, mesh))
    except AnnotationError as error:
        error.where = str(node.source)
        raise
    return tuple(Option(layout.format(shape), (layout,), (layout,), 1.0) for layout in found)


def node_options(
    graph: Graph, node: Node, mesh: Mesh, table: dict[str, OpRule]
) -> tuple[tuple[Option, ...], Signature | None]:
    """The choices of one node that is no parameter, and its signature where it has a rule.

    An annotation has its operand's rule, and of the layouts those that it allows. What another
    stage sent comes in any layout of splits.

    Of others, running it whole comes first. It is the only choice of inputs, buffers and operators
    without a rule.
    """
    rule = table.get(node.op)
    if node.op == "received":
        return received_options(node, mesh), None
    if node.is_leaf or rule is None:
        return whole_options(graph, node), None
    signature = resolve(rule, node, operand_types(graph, node), node.types)
    if node.op == "autopar.shard":
        return annotated_options(node, mesh), signature
    options = tuple(
        Option(str(s), s.operands, s.results, s.share(signature.sizes, mesh))
        for s in strategies(signature, mesh)
    )
    return options, signature

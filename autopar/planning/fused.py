"""What kernels save: the price of what they stand for, less their own."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.cost.model import CostModel, NodeWork, Work
from autopar.intra_op.options import operand_types
from autopar.intra_op.rule import OpRule, resolve
from autopar.intra_op.works import node_work, works
from autopar.ir.fusion.written import written
from autopar.ir.graph import PREFIX, Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.plan import Fused, Plan


def fused(
    graph: Graph, plan: Plan, table: dict[str, OpRule], prices: CostModel
) -> dict[str, Fused]:
    """Each kernel of a graph: how often, where first, and what a device saves in a step.

    What it would take otherwise is the price of the operators that its pattern writes, on the parts
    that the plan gives a device, with both layouts of every value whole.

    Args:
        graph: prepared.
        plan: for it.
        table: rules by operator.
        prices: of kernels.
    """
    alone = Mesh.parse(f"{plan.mesh.device}: one=1")
    own = works(graph, plan, table)
    found: dict[str, Fused] = {}
    for node in graph.folded:
        if not node.op.startswith(PREFIX):
            continue
        kernel, times = node.op.removeprefix(PREFIX), graph.multiplicity[node.name]
        layouts = [layout for _, layout in plan.nodes[node.name].operands]
        before = _works(_expanded(graph, node, layouts, plan.mesh), table, alone)
        after = _both(own[node.name])
        times_a_step = times * plan.microbatches
        sums = [
            times_a_step * (math.fsum(map(price, before)) - math.fsum(map(price, after)))
            for price in (lambda work: work.nbytes, prices.compute)
        ]
        last = found.get(kernel, Fused(0, _line(node), 0.0, 0.0))
        found[kernel] = Fused(
            last.count + times, last.first, last.nbytes + sums[0], last.seconds + sums[1]
        )
    return found


def _line(node: Node) -> str:
    source = node.source
    return f"{source.file}:{source.line}" if source.file else source.module


def _expanded(graph: Graph, node: Node, layouts: Iterable[Layout], mesh: Mesh) -> Graph:
    operands = [graph[name] for name in node.inputs]
    parts = [
        TensorType(operand.type.dtype, layout.local_shape(operand.type.shape, mesh))
        for operand, layout in zip(operands, layouts, strict=True)
    ]
    return written(node, operands, parts)


def _works(graph: Graph, table: dict[str, OpRule], mesh: Mesh) -> list[Work]:
    """The kernels of all operators of a graph on one device."""
    found: list[Work] = []
    for node in graph.nodes:
        if node.is_leaf:
            continue
        types = operand_types(graph, node)
        rule = table.get(node.op)
        signature = resolve(rule, node, types, node.types) if rule is not None else None
        into, out = (
            tuple(Layout.replicated(len(tensor.shape)) for tensor in tensors)
            for tensors in (types, node.types)
        )
        found += _both(node_work(graph, node, into, out, signature, mesh))
    return found


def _both(work: NodeWork) -> tuple[Work, ...]:
    return (*work.forward, *work.backward)

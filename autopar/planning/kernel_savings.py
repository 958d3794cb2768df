"""What kernels save: the price of what they stand for, less their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.cost.device import device
from autopar.cost.model import CostModel, NodeWork, Work
from autopar.cost.overlap import hidden, products
from autopar.intra_op.kernel_work import node_work, works
from autopar.intra_op.options import operand_types
from autopar.intra_op.rule import OpRule, resolve
from autopar.ir.collective import Resharder
from autopar.ir.fusion import ASYNC, EXPERTS, PACK, UPDATE
from autopar.ir.fusion.packed import COPIES, packing, reader
from autopar.ir.graph import PREFIX, Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.recompute import of_runs
from autopar.ir.tensor import Layout, TensorType
from autopar.lower.lines import Move
from autopar.lower.program import lower
from autopar.operators.mixture import MIXTURE
from autopar.passes.written import written
from autopar.plan_entries import Fused, NodePlan
from autopar.simulate.optimizer_step import update_works, updated_of
from autopar.stage_plan import StagePlan


def fused(
    graph: Graph, plan: StagePlan, table: dict[str, OpRule], prices: CostModel
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
        if not (node.op.startswith(PREFIX) or node.keyword("kernels")):
            continue
        kernel, times = node.op.removeprefix(PREFIX), graph.multiplicity[node.name]
        if node.op == MIXTURE:
            kernel, before = EXPERTS, _without(graph, node, plan, table)
        else:
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


def fused_exchange(graph: Graph, plan: StagePlan, prices: CostModel) -> dict[str, Fused]:
    """The exchanges that rotary embedding packs: how many, and what a device saves in a step.

    That is copies, which the price of an all_to_all does not count. {} if the plan has none.

    Args:
        graph: prepared.
        plan: for it.
        prices: of kernels.
    """
    count, first, saved = 0, "", list[Work]()
    for node, read, resharder in _rotated(graph, plan, prices):
        step = packing(node, _given(plan, node), _wanted(graph, plan, read, node), resharder)
        if step is None:
            continue
        times = graph.multiplicity[node.name]
        count, first = count + times, first or _line(node)
        copied = 2.0 * step.src.local_bytes(node.type, plan.mesh)
        copies = COPIES if node.requires_grad else COPIES - 1
        saved += [Work("copy", 0.0, copied, node.type.dtype)] * (copies * times * plan.microbatches)
    nbytes, seconds = (
        math.fsum(map(price, saved)) for price in (lambda work: work.nbytes, prices.compute)
    )
    return {PACK: Fused(count, first, nbytes, seconds)} if count else {}


def fused_linears(
    graph: Graph, plan: StagePlan, table: dict[str, OpRule], prices: CostModel
) -> dict[str, Fused]:
    """The collectives that run beside linears: how many, and what a device saves in a step.

    {} if the plan has none.

    Args:
        graph: prepared.
        plan: for it.
        table: rules by operator.
        prices: of kernels and collectives.
    """
    if ASYNC not in plan.fuse:
        return {}
    made = lower(graph.trained, plan, prices.collective)
    slowdown = device(plan.mesh).slowdown
    own, seconds = works(graph, plan, table), 0.0
    runs = zip(made.blocks, graph.repeats, of_runs(graph, plan.recompute), strict=True)
    functions = [(made.forward, 1, 0)]
    functions += [(f, r.count, 0 if how is None else how.blocks) for f, r, how in runs]
    found = [
        (line, times, again)
        for function, times, again in functions
        for line in function
        if isinstance(line, Move) and line.beside
    ]
    for line, times, again in found:
        parts = plan.mesh.axis_size(line.step.axes[0])
        sides = [products(own[n.name], graph[n.inputs[0]].requires_grad) for n in line.beside]
        for side, call, often in (
            (0, line.step.forward, times + again),
            (1, line.step.backward, times),
        ):
            kernels = math.fsum(prices.compute(work) for each in sides for work in each[side])
            sent = 0.0 if call is None else prices.collective(call)
            seconds += plan.microbatches * often * hidden(kernels, sent, parts, slowdown)
    beside = {line.beside[0].name for line, _, _ in found}
    first = next((_line(node) for node in graph.nodes if node.name in beside), "")
    count = sum(times for _, times, _ in found)
    return {ASYNC: Fused(count, first, 0.0, seconds)} if count else {}


def packed(graph: Graph, plan: StagePlan, prices: CostModel) -> StagePlan:
    """The plan with exchanges of rows for heads behind rotary embedding, where the kernel packs.

    Behind the transpose that follows they take as long, and a plan may have them there.

    Args:
        graph: prepared.
        plan: for it.
        prices: of collectives.
    """
    nodes = dict(plan.nodes)
    for node, turned, resharder in _rotated(graph, plan, prices):
        given, readers = _given(plan, node), graph.users[turned.name]
        alike = _wanted(graph, plan, turned, node) == given
        if (turned.op, turned.args[1:]) != _TURN or len(readers) != 1 or not alike:
            continue
        wanted = _turned(_wanted(graph, plan, graph[readers[0]], turned))
        if (step := packing(node, given, wanted, resharder)) is not None:
            operand, result = (node.type.shape, step.dst), (turned.type.shape, _turned(step.dst))
            nodes[graph.template[turned.name]] = NodePlan((operand,), (result,))
    return replace(plan, nodes=nodes)


_TURN = ("aten.transpose.int", (1, 2))


def _turned(layout: Layout) -> Layout:
    first, rows, heads, last = layout.dims
    return layout.with_dims((first, heads, rows, last))


def _rotated(
    graph: Graph, plan: StagePlan, prices: CostModel
) -> Iterator[tuple[Node, Node, Resharder]]:
    """Rotary embeddings that may pack what they send, each with what reads it."""
    named = plan.collectives.named
    resharder = Resharder(plan.mesh, prices.collective, plan.precision.widened, named)
    for node in graph.folded if PACK in plan.fuse else ():
        if (read := reader(graph, node)) is not None:
            yield node, read, resharder


def _given(plan: StagePlan, node: Node) -> Layout:
    return plan.nodes[node.name].results[0][1]


def _wanted(graph: Graph, plan: StagePlan, read: Node, node: Node) -> Layout:
    """The layout in which an operator reads a node."""
    operands = plan.nodes[graph.template[read.name]].operands
    return operands[read.inputs.index(node.name)][1]


def applicable(chosen: tuple[str, ...], graph: Graph, precision: Precision) -> tuple[str, ...]:
    """What is to be fused, without the optimizer's kernel where a dtype is none that it updates.

    Args:
        chosen: names as `autopar.ir.fusion.choose` gives them.
        graph: whose parameters are trained.
        precision: in which dtypes they are updated.
    """
    trained = (leaf.type for leaf in graph.leaves("param") if leaf.requires_grad)
    fits = {precision.updated(kind).dtype for kind in trained} <= {"f32", "f64"}
    return chosen if fits else tuple(name for name in chosen if name != UPDATE)


def fused_update(graph: Graph, plan: StagePlan, prices: CostModel) -> dict[str, Fused]:
    """The optimizer's kernel: how often it is launched, and what a device saves in a step.

    Otherwise an optimizer in one pass would do the same, and round masters in another. {} if the
    plan has no such kernel.

    Args:
        graph: prepared.
        plan: for it.
        prices: of kernels.
    """
    read = [node for node in graph.leaves("param") if graph.users[node.name]]
    trained = [updated_of(graph, plan, node) for node in read if node.requires_grad]
    if not (plan.fuses_update and trained):
        return {}
    before, after = (
        update_works(trained, plan.state_bytes, kernel, plan.bucket) for kernel in (False, True)
    )
    nbytes, seconds = (
        math.fsum(map(price, before)) - math.fsum(map(price, after))
        for price in (lambda work: work.nbytes, prices.compute)
    )
    launches = sum(work.op == "adamw_" for work in after)
    return {"adamw_": Fused(launches, "the optimizer's step", nbytes, seconds)}


def _without(graph: Graph, node: Node, plan: StagePlan, table: dict[str, OpRule]) -> list[Work]:
    """What a mixture of experts would launch without its kernels."""
    types, entry = operand_types(graph, node), plan.nodes[node.name]
    signature = resolve(table[node.op], node, types, node.types)
    into, out = (tuple(layout for _, layout in side) for side in (entry.operands, entry.results))
    written = replace(node, kwargs=())
    return [*_both(node_work(graph, written, into, out, signature, plan.mesh))]


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

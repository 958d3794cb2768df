"""Prices the savings of kernels: the operators that they replace, minus the kernels themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.cost.device import device
from autopar.cost.model import CostModel, NodeWork, Work
from autopar.cost.overlap import hidden, products
from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.rule import OpRule, resolve
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.fusion import ASYNC, EXPERTS, PACK, UPDATE
from autopar.ir.fusion.packed import COPIES, packing, reader
from autopar.ir.graph import PREFIX, Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.recompute import of_runs
from autopar.ir.resharding import Resharder, Reshardings
from autopar.ir.tensor import Layout, TensorType
from autopar.lower.lines import Compute, Joined, Lowered
from autopar.lower.program import lower
from autopar.operators.mixture import MIXTURE
from autopar.passes.expand_kernels import expand_kernel
from autopar.plan_entries import Fused, NodePlan
from autopar.simulate.optimizer_step import update_works, updated_of
from autopar.stage_plan import StagePlan


def savings(
    graph: Graph, plan: StagePlan, table: dict[str, OpRule], prices: CostModel
) -> dict[str, Fused]:
    """Returns the savings of each kernel that replaces several operators.

    The kernels are those of the lowered program, so the savings are those of the program that runs.

    Args:
        graph: the prepared graph.
        plan: its plan.
        table: sharding rules by operator.
        prices: prices of kernels and collectives.

    Returns:
        Kernel -> its uses, its first use, and the bytes and seconds that a device saves in a step.
    """
    if not plan.fuse and not any(map(_is_kernel, graph.folded)):
        return {}
    program = lower(graph.trained, plan, prices.collective)
    return (
        _operators(program, graph, plan, table, prices)
        | _exchanges(program, graph, plan, prices)
        | linears(program, graph, plan, table, prices)
        | _update(graph, plan, prices)
    )


def _operators(
    program: Lowered, graph: Graph, plan: StagePlan, table: dict[str, OpRule], prices: CostModel
) -> dict[str, Fused]:
    """Returns the savings of kernels that replace operators.

    The operators are priced on the parts that the plan gives a device, each whole on that part.
    """
    alone = Mesh.parse(f"{plan.mesh.device}: one=1")
    saved: dict[str, Fused] = {}
    for line, run in program.trained:
        if not (isinstance(line, Compute) and _is_kernel(line.node)):
            continue
        node, times = line.node, _count(graph, run)
        kernel, after = node.op.removeprefix(PREFIX), _both(_work(line, graph, plan, table))
        if node.op == MIXTURE:
            kernel = EXPERTS
            kept = tuple(pair for pair in node.kwargs if pair[0] != "kernels")
            without = replace(line, node=replace(node, kwargs=kept))
            before = _both(_work(without, graph, plan, table))
        else:
            before = tuple(_whole(_expanded(graph, node, line.into, plan.mesh), table, alone))
        times_a_step = times * plan.microbatches
        sums = [
            times_a_step * (math.fsum(map(price, before)) - math.fsum(map(price, after)))
            for price in (lambda work: work.nbytes, prices.compute)
        ]
        last = saved.get(kernel, Fused(0, _line(node), 0.0, 0.0))
        saved[kernel] = Fused(
            last.count + times, last.first, last.nbytes + sums[0], last.seconds + sums[1]
        )
    return saved


def _is_kernel(node: Node) -> bool:
    return node.op.startswith(PREFIX) or bool(node.keyword("kernels"))


def _count(graph: Graph, run: int | None) -> int:
    """Returns how often a microbatch runs a line of a run of blocks, or of no run."""
    return 1 if run is None else graph.repeats[run].count


def _exchanges(
    program: Lowered, graph: Graph, plan: StagePlan, prices: CostModel
) -> dict[str, Fused]:
    """Returns the savings of exchanges that rotary embedding packs.

    They save copies, which the price of an all_to_all does not include.
    """
    count, first, saved = 0, "", list[Work]()
    for line, run in program.trained:
        if not isinstance(line, Joined) or line.move.overlapped:
            continue
        ((node, step),) = ((operator.node, line.move.step) for operator in line.operators)
        times = _count(graph, run)
        count, first = count + times, first or _line(node)
        copied = 2.0 * step.src.local_bytes(node.type, plan.mesh)
        copies = COPIES if node.requires_grad else COPIES - 1
        saved += [Work("copy", 0.0, copied, node.type.dtype)] * (copies * times * plan.microbatches)
    nbytes, seconds = (
        math.fsum(map(price, saved)) for price in (lambda work: work.nbytes, prices.compute)
    )
    return {PACK: Fused(count, first, nbytes, seconds)} if count else {}


def linears(
    program: Lowered, graph: Graph, plan: StagePlan, table: dict[str, OpRule], prices: CostModel
) -> dict[str, Fused]:
    """Returns the savings of collectives that overlap with linears; {} if there are none.

    Args:
        program: the lowered program.
        graph: its prepared graph.
        plan: its plan.
        table: sharding rules by operator.
        prices: prices of kernels and collectives.

    Returns:
        "async" -> the number of collectives, and the seconds that a device saves in a step.
    """
    recomputed, slowdown = of_runs(graph, plan.recompute), device(plan.mesh).slowdown
    count, names, seconds = 0, set[str](), 0.0
    for line, run in program.trained:
        if not isinstance(line, Joined) or not line.move.overlapped:
            continue
        step, times = line.move.step, _count(graph, run)
        how = None if run is None else recomputed[run]
        again = 0 if how is None else how.blocks
        count += times
        names.add(line.move.overlapped[0].name)
        parts = plan.mesh.axis_size(step.axes[0])
        sides = [
            products(_work(o, graph, plan, table), graph[o.node.inputs[0]].requires_grad)
            for o in line.operators
        ]
        for side, call, often in ((0, step.forward, times + again), (1, step.backward, times)):
            kernels = math.fsum(prices.compute(work) for each in sides for work in each[side])
            sent = 0.0 if call is None else prices.collective(call)
            seconds += plan.microbatches * often * hidden(kernels, sent, parts, slowdown)
    first = next((_line(node) for node in graph.nodes if node.name in names), "")
    return {ASYNC: Fused(count, first, 0.0, seconds)} if count else {}


def packed(graph: Graph, plan: StagePlan, prices: CostModel) -> StagePlan:
    """Moves the exchange from rows to heads before the transpose after rotary embedding.

    Only there can the kernel pack it. Before and after that transpose the exchange takes equally
    long, so a plan may have it after.

    Args:
        graph: the prepared graph.
        plan: its plan.
        prices: prices of collectives.

    Returns:
        The plan with these layouts changed.
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
    """Yields rotary embeddings that can pack their exchange, each with its reader."""
    known = Reshardings.of(plan.mesh, prices.collective)
    resharder = known.resharder(plan.precision, plan.collectives)
    for node in graph.folded if PACK in plan.fuse else ():
        if (read := reader(graph, node)) is not None:
            yield node, read, resharder


def _given(plan: StagePlan, node: Node) -> Layout:
    return plan.nodes[node.name].results[0][1]


def _wanted(graph: Graph, plan: StagePlan, read: Node, node: Node) -> Layout:
    """Returns the layout in which an operator reads a node."""
    operands = plan.nodes[graph.template[read.name]].operands
    return operands[read.inputs.index(node.name)][1]


def applicable(chosen: tuple[str, ...], graph: Graph, precision: Precision) -> tuple[str, ...]:
    """Drops the optimizer's kernel from fusions if it does not support a parameter's dtype.

    Args:
        chosen: names from `autopar.ir.fusion.choose`.
        graph: the graph whose parameters are trained.
        precision: gives the dtypes in which parameters are updated.
    """
    trained = (leaf.type for leaf in graph.leaves("param") if leaf.requires_grad)
    fits = {precision.updated(kind).dtype for kind in trained} <= {"f32", "f64"}
    return chosen if fits else tuple(name for name in chosen if name != UPDATE)


def _update(graph: Graph, plan: StagePlan, prices: CostModel) -> dict[str, Fused]:
    """Returns the savings of the optimizer's kernel.

    Without the kernel, an optimizer also runs in one pass, but casts master weights in another.
    """
    read = [node for node in graph.leaves("param") if graph.users[node.name]]
    trained = [updated_of(graph, plan, node) for node in read if node.requires_grad]
    if not (plan.fuses_update and trained):
        return {}
    before, after = (update_works(trained, kernel, plan.bucket) for kernel in (False, True))
    nbytes, seconds = (
        math.fsum(map(price, before)) - math.fsum(map(price, after))
        for price in (lambda work: work.nbytes, prices.compute)
    )
    launches = sum(work.op == "adamw_" for work in after)
    return {"adamw_": Fused(launches, "the optimizer's step", nbytes, seconds)}


def _work(line: Compute, graph: Graph, plan: StagePlan, table: dict[str, OpRule]) -> NodeWork:
    """Prices an operator in the layouts in which its line computes it."""
    node, types, rule = line.node, operand_types(graph, line.node), table.get(line.node.op)
    signature = resolve(rule, node, types, node.types) if rule is not None else None
    return node_work(graph, node, line.into, line.out, signature, plan.mesh, line.form)


def _line(node: Node) -> str:
    source = node.source
    return f"{source.file}:{source.line}" if source.file else source.module


def _expanded(graph: Graph, node: Node, layouts: Iterable[Layout], mesh: Mesh) -> Graph:
    operands = [graph[name] for name in node.inputs]
    parts = [
        TensorType(operand.type.dtype, layout.local_shape(operand.type.shape, mesh))
        for operand, layout in zip(operands, layouts, strict=True)
    ]
    return expand_kernel(node, operands, parts)


def _whole(graph: Graph, table: dict[str, OpRule], mesh: Mesh) -> Iterator[Work]:
    """Yields the kernels of all operators of a graph on one device."""
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
        yield from _both(node_work(graph, node, into, out, signature, mesh))


def _both(work: NodeWork) -> tuple[Work, ...]:
    return (*work.forward, *work.backward)

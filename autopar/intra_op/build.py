"""Builds the strategy problem of a graph node by node; `builder.py` describes its contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.cost.model import CostModel
from autopar.errors import UnknownOperatorError
from autopar.intra_op.assumptions import DEFAULT, Assumptions
from autopar.intra_op.builder import Builder
from autopar.intra_op.built_problem import Built, layouts
from autopar.intra_op.pins.layout_pins import Pins
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Problem, frugal, too_small
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh

__all__ = ["Built", "build", "layouts"]


def build(
    graph: Graph,
    mesh: Mesh,
    model: CostModel | Prices,
    table: dict[str, OpRule],
    given: Assumptions = DEFAULT,
    *,
    memory_limit: float | None = None,
    pins: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Built:
    """Returns the strategy problem of a graph in which each parameter is read by one share.

    Args:
        graph: normalised, annotated, with its repeats.
        mesh: the devices.
        model: prices in seconds, or cached prices of earlier problems on this mesh.
        table: rules by operator.
        given: how the model is trained.
        memory_limit: bytes per device, or infinity if a limit is set later. None ignores memory,
            and allows parameters to be gathered where their copies are not counted.
        pins: layouts fixed by the user; see `pins/layout_pins.py`.
        progress: called with the name of each stage as it begins.

    Raises:
        UnknownOperatorError: an operator has no rule and `unknown_ops` is "error"; or `unknown_ops`
            is neither "replicate" nor "error".
        PlanError: a pin names nothing or fits no choice.
        CostError: the model returns a price that is negative or not finite.
        InfeasibleError: no plan can meet the memory limit.
    """
    if given.unknown_ops not in ("replicate", "error"):
        raise UnknownOperatorError(
            f"unknown_ops is {given.unknown_ops!r}", todo='pass "replicate" or "error"'
        )
    progress("strategies")
    fixed = Pins(graph, pins or {})
    prices = model if isinstance(model, Prices) else Prices(mesh, model)
    builder = Builder(graph, prices, table, fixed, given, limited=memory_limit is not None)
    for node in graph.folded:
        if node.op == "param" and graph.users[node.name]:
            continue  # added with its share
        if node.op == "autopar.share" and graph[node.inputs[0]].op == "param":
            builder.add_parameter(graph[graph.template[node.inputs[0]]], node)
        else:
            builder.add(node)
    fixed.check()
    choices = tuple(builder.choices)
    if memory_limit is not None:
        worst, held = frugal(choices)
        if sum(held.values()) > memory_limit:
            where = builder.alive.points[worst]
            raise too_small("no plan fits", memory_limit, sum(held.values()), held, where)
    progress("reshardings")
    problem = Problem(graph.name, choices, builder.edges(), memory_limit)
    return Built(
        problem,
        tuple(builder.names),
        tuple(builder.options),
        tuple(builder.replicated),
        builder.exchanged,
        builder.backward,
        builder.synchronised,
        given.slowdown,
        builder.sums,
        builder.alive.points,
        again=builder.again,
        once=builder.once,
        forward=builder.forward,
        fetched=builder.fetched,
        refetched=builder.refetched,
        stowed=builder.stowed,
        host=builder.host,
        ahead=given.execution.ahead,
        overlapped=builder.hidden.found,
        coming=0.0 if builder.away is None else builder.away.seconds / given.microbatches,
    )

"""Builds the strategy problem of a graph node by node; `builder.py` describes its contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.cost.model import CostModel
from autopar.cost.overlap import TAKE_TURNS
from autopar.errors import UnknownOperatorError
from autopar.intra_op.builder import Builder
from autopar.intra_op.built_problem import Built, layouts
from autopar.intra_op.node_choices import Lies
from autopar.intra_op.pins.layout_pins import Pins
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Problem, frugal, too_small
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.offload import NOTHING, Offload
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.recompute import Recompute

__all__ = ["Built", "build", "layouts"]


def build(
    graph: Graph,
    mesh: Mesh,
    model: CostModel,
    table: dict[str, OpRule],
    *,
    memory_limit: float | None = None,
    state_bytes: float = 2.0,
    unknown_ops: str = "replicate",
    pins: Mapping[str, str] | None = None,
    slowdown: float = TAKE_TURNS,
    recompute: Mapping[str, Recompute] | None = None,
    microbatches: int = 1,
    lies: Lies | None = None,
    bucket: int = 1,
    precision: Precision = AS_IS,
    offload: Offload = NOTHING,
    fused_update: bool = False,
    overlapped: bool = False,
    prices: Prices | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Built:
    """Returns the strategy problem of a graph in which each parameter is read by one share.

    Args:
        graph: normalised, annotated, with its repeats.
        mesh: the devices.
        model: prices, in seconds.
        table: rules by operator.
        memory_limit: bytes per device, or infinity if a limit is set later. None ignores memory,
            and allows parameters to be gathered where their copies are not counted.
        state_bytes: optimizer state relative to the bytes of what it updates (2 for AdamW).
        unknown_ops: "replicate" or "error".
        pins: layouts fixed by the user; see `pins/layout_pins.py`.
        slowdown: slowdown of kernels and collectives that run side by side; at 2, as if they took
            turns, overlap gains nothing.
        recompute: runs of blocks that recompute activations in the backward; the resharding of
            their recomputed forward is priced without a gradient.
        microbatches: number in a step; costs are those of one, with its part of once-a-step costs.
        lies: storages that a parameter may choose; by default all that make sense.
        bucket: bytes of gradients or parameters sent together; 1 sends each by itself.
        precision: dtypes in which parameters are updated and gradients are sent.
        offload: what is kept in host memory.
        fused_update: whether the optimizer step is the AdamW kernel.
        overlapped: whether collectives run beside the linears around them.
        prices: cached prices of earlier problems of this model on this mesh.
        progress: called with the name of each stage as it begins.

    Raises:
        UnknownOperatorError: an operator has no rule and `unknown_ops` is "error"; or `unknown_ops`
            is neither "replicate" nor "error".
        PlanError: a pin names nothing or fits no choice.
        CostError: the model returns a price that is negative or not finite.
        InfeasibleError: no plan can meet the memory limit.
    """
    if unknown_ops not in ("replicate", "error"):
        raise UnknownOperatorError(
            f"unknown_ops is {unknown_ops!r}", todo='pass "replicate" or "error"'
        )
    progress("strategies")
    fixed = Pins(graph, pins or {})
    limited = memory_limit is not None
    builder = Builder(
        graph, prices or Prices(mesh, model), table, state_bytes, unknown_ops, fixed, slowdown,
        limited, recompute, microbatches, lies, bucket, precision, offload,
        fused_update, overlapped,
    )  # fmt: skip
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
        builder.beside,
        slowdown,
        builder.sums,
        builder.alive.points,
        again=builder.again,
        once=builder.once,
        forward=builder.forward,
        fetched=builder.fetched,
        refetched=builder.refetched,
        stowed=builder.stowed,
        host=builder.host,
        overlapped=builder.hidden.found,
        coming=0.0 if builder.away is None else builder.away.seconds / microbatches,
    )

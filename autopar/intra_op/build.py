"""The strategy problem of a graph, built node by node; see `builder.py` for what is in it."""

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
    """The strategy problem of a graph in which every parameter is read by one share.

    Args:
        graph: normalised, annotated, with its repeats.
        mesh: the devices.
        model: prices, in seconds.
        table: rules by operator.
        memory_limit: bytes per device, infinite for one that is set later. With None, memory does
            not matter, and parameters may be gathered where it is not counted.
        state_bytes: optimizer state in units of the bytes of what it updates (AdamW: 2).
        unknown_ops: "replicate" or "error".
        pins: layouts that are fixed; see pins.py.
        slowdown: how many times as long kernels and collectives take side by side; 2, as if they
            took turns, leaves nothing to gain from not waiting for gradients.
        recompute: runs of blocks that compute their activations again in the backward; their
            layouts change again as cheaply as can be without a gradient.
        microbatches: in a step; costs are those of one, with its part of what a step does once.
        lies: where the states of a parameter may lie, by default everywhere that makes sense.
        bucket: bytes of gradients, or of parameters, that go together; 1 if each goes by itself.
        precision: in which dtypes parameters are updated and gradients sent.
        offload: what lies in host memory.
        fused_update: whether the optimizer's step is AdamW's kernel.
        overlapped: whether collectives run beside the linears around them.
        prices: what earlier problems on this mesh and of this model have found out.
        progress: told of each stage as it begins.

    Raises:
        UnknownOperatorError: an operator has no rule and `unknown_ops` is "error", or is neither.
        PlanError: a pin names nothing or fits no choice.
        CostError: a price of the model is negative or not finite.
        InfeasibleError: no plan at all can meet the memory limit.
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
            continue  # with its share
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

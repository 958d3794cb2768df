"""FLOPs of a model's matrix products in a step, without recomputation and whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.intra_op.rule import OpRule
from autopar.intra_op.work.kernel_work import works
from autopar.ir.graph import Graph
from autopar.ir.tensor import Layout
from autopar.plan_entries import NodePlan
from autopar.stage_plan import StagePlan


def model_flops(graph: Graph, plan: StagePlan, known: Mapping[str, OpRule]) -> dict[str, float]:
    """Returns the FLOPs of all matrix products of a forward and a backward, by dtype.

    They are those that the model FLOPs utilisation counts (Chowdhery et al., "PaLM", arXiv
    2204.02311, appendix B).

    Args:
        graph: prepared, of the batch or of a microbatch.
        plan: its plan, for precision and kernels.
        known: sharding rules by operator.
    """
    found: dict[str, float] = {}
    for name, work in works(graph, _whole(graph, plan), dict(known)).items():
        for kernel in (*work.forward, *work.backward):
            if kernel.gemm:
                flops = graph.multiplicity[name] * kernel.share * kernel.flops
                found[kernel.dtype] = found.get(kernel.dtype, 0.0) + flops
    return found


def _whole(graph: Graph, plan: StagePlan) -> StagePlan:
    """Returns the plan that splits nothing; its FLOPs are those of the model."""
    nodes = {}
    for node in graph.folded:
        reads = [graph[name].type.shape for name in node.inputs]
        gives = [tensor.shape for tensor in node.types]
        into, out = (
            tuple((shape, Layout.replicated(len(shape))) for shape in side)
            for side in (reads, gives)
        )
        nodes[node.name] = NodePlan(into, out)
    return replace(plan, nodes=nodes)

"""The peak memory of a plan's simulated step."""

from __future__ import annotations

from autopar.cost.device import device
from autopar.cost.model import AnalyticModel, CostModel
from autopar.intra_op.kernel_work import works
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph
from autopar.ir.stage_graphs import is_trained
from autopar.planning.pipelines.repeated import Repeated
from autopar.simulate import after_forward, fixed_bytes, kept_bytes, run, settings_on, tasks
from autopar.stage_plan import StagePlan


def simulated_peak(
    graph: Graph,
    plan: StagePlan,
    known: dict[str, OpRule],
    prices: CostModel,
    repeated: Repeated | None = None,
) -> float:
    """Returns the peak of a simulated step in bytes per device; without a backward, the plan's own.

    Args:
        graph: the prepared graph.
        plan: its plan.
        known: sharding rules by operator.
        prices: of collectives, by which code generation chooses the steps of resharding.
        repeated: for a stage, how often it runs; the peak then includes other microbatches and
            stages.
    """
    if not is_trained(graph):
        return plan.predicted.peak_bytes
    settings = settings_on(plan.mesh.device)
    step = tasks(graph, plan, works(graph, plan, known), prices, settings)
    model = AnalyticModel(plan.mesh, in_step=True)
    peak = run(step, model, device(plan.mesh).slowdown).memory.peak
    if repeated is None:
        return peak
    left, trained = after_forward(step), {n.name for n in graph.leaves("param") if n.requires_grad}
    fixed, kept = fixed_bytes(left, trained), kept_bytes(left)
    further = repeated.further.in_plan(graph, plan)
    return peak + repeated.others(fixed + kept, kept) + further

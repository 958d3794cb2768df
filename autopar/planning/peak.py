"""The seconds and the peak memory of a plan's simulated step."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cost.device import device
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel, CostModel
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.rule import OpRule
from autopar.intra_op.work.kernel_work import works
from autopar.ir.executed.execution import AS_WRITTEN
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.stage_graphs import is_trained
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.prices import host_of
from autopar.simulate import Timeline, fixed_bytes, kept_bytes, run, settings_on, tasks
from autopar.simulate.task import COMPUTE
from autopar.stage_plan import StagePlan


def with_simulated(
    graph: Graph,
    plan: StagePlan,
    known: dict[str, OpRule],
    prices: CostModel,
    repeated: Repeated | None = None,
) -> StagePlan:
    """Returns the plan with the figures that only a simulated step provides, if it has a backward.

    These are its peak memory, including the allocator's reserve, the seconds of its step, and those
    of its update; those of a stage are its pipeline's. If the plan specifies how kernels are
    executed, or its update multiplies matrices, such as Muon's, the step also includes the seconds
    in which the device waits for its host.

    Args:
        graph: the prepared graph.
        plan: its plan.
        known: sharding rules by operator.
        prices: prices of collectives, by which code generation chooses the steps of resharding.
        repeated: for a stage, how often it runs; the peak then includes other microbatches and
            stages.
    """
    if not is_trained(graph):
        return plan
    counted = plan if repeated is None else replace(plan, microbatches=repeated.in_update)
    model, slowdown = _engine_prices(plan.mesh, prices), device(plan.mesh).slowdown
    settings = settings_on(plan.mesh.device, graph.execution, host_of(model))
    step = tasks(graph, counted, works(graph, counted, known), prices, settings)
    timeline, predicted = run(step, model, slowdown), plan.predicted
    peak = timeline.memory.peak
    if repeated is not None:
        fixed, kept = fixed_bytes(step), kept_bytes(step)
        peak += repeated.others(fixed + kept, kept) + repeated.further.in_plan(graph, counted)
    else:
        updated, waiting = updating(timeline), 0.0
        given = graph.execution != AS_WRITTEN or any(rule.products for rule in plan.update.rules)
        if given and settings.host is not None:
            issued = run(step, model, slowdown, settings.host)
            waiting = issued.seconds - timeline.seconds
        predicted = replace(
            predicted,
            step_seconds=predicted.step_seconds - predicted.update_seconds + updated + waiting,
            simulated_seconds=timeline.seconds + waiting,
            update_seconds=updated,
            waiting_seconds=waiting,
        )
    peak /= 1 - graph.execution.reserve
    return replace(plan, predicted=replace(predicted, peak_bytes=peak))


def _engine_prices(mesh: Mesh, prices: CostModel) -> AnalyticModel | MeasuredModel:
    """Returns the prices that are cached by some, or closed forms if a caller has its own."""
    own = prices.model.model if isinstance(prices, Prices) else prices
    if isinstance(own, AnalyticModel | MeasuredModel):
        return own
    return AnalyticModel(mesh, in_step=True)


def updating(timeline: Timeline) -> float:
    """Returns the seconds of an update without its collectives, which are counted by themselves."""
    return math.fsum(
        span.seconds
        for span in timeline.spans
        if span.task.phase == "optimizer" and span.task.stream == COMPUTE
    )


def simulated_peak(
    graph: Graph,
    plan: StagePlan,
    known: dict[str, OpRule],
    prices: CostModel,
    repeated: Repeated | None = None,
) -> float:
    """Returns the peak of a simulated step in bytes; arguments as in `with_simulated`."""
    return with_simulated(graph, plan, known, prices, repeated).predicted.peak_bytes

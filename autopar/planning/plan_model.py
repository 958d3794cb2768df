"""Plans a call of a model: in one stage, in a given number of stages, or in the best stages."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.capture import Captured
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.local_batches import capture_parts, stage_mesh
from autopar.planning.options import Options
from autopar.planning.pipelines.automatic import AnySize, plan_pipeline
from autopar.planning.pipelines.schedule_names import groups_for
from autopar.planning.pipelines.stages import equal_parts, even_ends, plan_stages
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace


def plan_model(call: Call, mesh: Mesh, options: Options, trace: Trace) -> Plan:
    """Captures a model and returns its fastest plan within memory.

    Args:
        call: the model and a batch.
        mesh: the devices.
        options: options of planning.
        trace: writes intermediate values.

    Raises:
        CaptureError, BatchError: see `capture_call`.
        InfeasibleError, PinError, StageError: see `make_plan` and `plan_stages`.
    """
    if options.searches_stages:
        return plan_any_stages(call, mesh, options, trace)
    count = options.microbatches if options.is_pipeline else None
    captured = capture_parts(call, stage_mesh(mesh, options), options, trace, count)
    return plan_captured(captured, mesh, options, trace)


def plan_captured(captured: Captured, mesh: Mesh, options: Options, trace: Trace) -> Plan:
    """Returns the plan of a captured model; a pipeline's is captured on one microbatch."""
    if options.is_pipeline:
        return plan_evenly(captured.graph, mesh, options, trace)
    return Plan.of(make_plan(captured.graph, mesh, options, trace))


def plan_evenly(graph: Graph, mesh: Mesh, options: Options, trace: Trace) -> Plan:
    """Plans stages of about equal time on equal parts of the mesh.

    Args:
        graph: the model on one microbatch, normalised.
        mesh: all devices.
        options: with the number of stages, microbatches and the schedule.
        trace: writes intermediate values.

    Raises:
        MeshError, StageError, ScheduleError, InfeasibleError: see `plan_stages`.
    """
    stages = int(options.stages)
    groups = groups_for(options.schedule, stages, options.microbatches)
    parts = equal_parts(mesh, groups)
    ends = even_ends(graph, stages, parts[0].mesh, replace(options, whole=mesh))
    return plan_stages(
        graph, ends, parts, mesh, options.microbatches, options.schedule, options, trace
    )


def plan_any_stages(call: Call, mesh: Mesh, options: Options, trace: Trace) -> Plan:
    """Returns the fastest pipeline for the global batch; raises the errors of `plan_pipeline`."""

    def graph(samples: int, layers: int | None) -> Graph:
        return capture_call(call.sized(samples), options, Trace(None)).graph

    batch = options.global_batch or call.samples
    return plan_pipeline(AnySize(graph), batch, mesh, options, trace)[1]

"""The story of `compile` for a pipeline: capture -> cut -> plan -> emit -> load, stage by stage."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from autopar.arguments import text_of_graph, text_of_program
from autopar.capture.capture import Captured
from autopar.capture.structure import Structure
from autopar.codegen.emit import emit
from autopar.errors import BatchError, PlanError, ProgramError
from autopar.inter_op.gantt import gantt
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.intra_op import legal
from autopar.ir.graph_text import fingerprint, format_graph
from autopar.ir.mesh import Mesh
from autopar.lower.literals import printable
from autopar.passes.normalise import NORMALISING
from autopar.pipeline_plan import PipelinePlan
from autopar.planning.pipelines.stages import (
    equal_parts,
    even_ends,
    groups_for,
    plan_stages,
    schedule_of,
    stage_graphs,
)
from autopar.planning.single import Options, Trace, capture_graph, cost_model
from autopar.runtime.inductor import loaded
from autopar.runtime.pipeline.folder import program_source, stage_files
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.processes import from_first_rank, local_device
from autopar.runtime.update.update import Training, state_bytes_of

_COLUMNS = 88  # of the schedule's picture
ADVICE = "build one model on every rank, and give every rank the same whole batch"


@dataclass(frozen=True)
class Request:
    """What a user says of a pipeline.

    Attributes:
        stages: into how many the model is cut.
        microbatches: into how many equal slices a batch is cut.
        schedule: name and options.
    """

    stages: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"


@dataclass(frozen=True)
class Made:
    """A pipeline that is ready to train.

    Attributes:
        plan: how it is cut and planned.
        sources: the generated Python of every stage.
        captured: the model on one microbatch; its graph is normalised only.
        pipeline: what runs it on this rank.
    """

    plan: PipelinePlan
    sources: tuple[str, ...]
    captured: Captured
    pipeline: Pipeline


def microbatch(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first of `count` equal slices of a batch along its first dimension.

    Tensors without dimensions belong to every slice.

    Raises:
        BatchError: a tensor does not divide; names it.
    """
    structure = Structure.of({"args": args, "kwargs": kwargs}, "", constants=True)
    slices = {}
    for name, value in structure.flatten({"args": args, "kwargs": kwargs}).items():
        if value.dim() and value.shape[0] % count:
            raise BatchError(
                f"the input {name.partition('.')[2]!r} does not divide into {count} microbatches",
                why=f"its shape is {list(value.shape)}; every microbatch is an equal slice along "
                "the first dimension",
                todo="pass a batch whose size is a multiple of the number of microbatches",
            )
        slices[name] = value[: value.shape[0] // count] if value.dim() else value
    rebuilt = structure.rebuild(slices)
    return rebuilt["args"], rebuilt["kwargs"]


def capture_microbatch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    options: Options,
    trace: Trace,
) -> Captured:
    """The model's forward on one of `count` microbatches, normalised; raises as `capture_graph`."""
    args, kwargs = microbatch(args, kwargs, count)
    return capture_graph(model, args, kwargs, options, trace, NORMALISING)


def plan_evenly(
    captured: Captured,
    mesh: Mesh,
    request: Request,
    options: Options,
    trace: Trace,
    state: float = 2.0,
) -> PipelinePlan:
    """Stages of about equal time on equal parts of the mesh; raises as `plan_stages`."""
    groups = groups_for(request.schedule, request.stages, request.microbatches)
    parts = equal_parts(mesh, groups)
    own = replace(options, whole=mesh)
    ends = even_ends(captured.graph, request.stages, parts[0].mesh, own)
    return plan_stages(
        captured.graph,
        ends,
        parts,
        mesh,
        request.microbatches,
        request.schedule,
        options,
        trace,
        state,
    )


def sources_of(captured: Captured, plan: PipelinePlan, options: Options) -> tuple[str, ...]:
    """The generated Python of every stage.

    Raises:
        PlanMismatchError: the plan is for another model.
        PlanError: a layout is none that the rules allow.
    """
    found, options = [], replace(options, whole=plan.mesh)
    graphs = stage_graphs(captured.graph, plan.ends, Trace(None))
    for graph, stage in zip(graphs, plan.stages, strict=True):
        wanted = {node.name for node in graph.folded}
        stage.plan.check(fingerprint(graph), wanted, stage.plan.mesh)
        legal.check(graph, stage.plan, options.table)
        found.append(emit(graph, stage.plan, cost_model(stage.plan.mesh, options).collective))
    return tuple(found)


def placement_of(plan: PipelinePlan) -> Placement:
    """Where the stages of a plan run, and when.

    Raises:
        ScheduleError: there is no such schedule for the plan's sizes.
        PlanError: the schedule wants the stages elsewhere.
    """
    groups = len({start for stage in plan.stages for start in stage.starts})
    schedule = schedule_of(plan.schedule, groups, plan.microbatches)
    wanted = [
        tuple(copy[number] for copy in schedule.placement) for number in range(schedule.stages)
    ]
    given = [stage.starts for stage in plan.stages]
    pairs = {
        pair
        for places, starts in zip(wanted, given, strict=False)
        for pair in zip(places, starts, strict=False)
    }
    alike = [len(starts) for starts in given] == [len(places) for places in wanted]
    if not alike or len(pairs) != groups:
        raise PlanError(
            f"the plan's stages do not stand as the schedule {plan.schedule!r} wants them",
            why=f"their first ranks are {given}; groups of ranks with the numbers {wanted} do them",
            todo="correct the entries `ranks`, or plan again",
        )
    ranks = tuple(
        tuple(stage.ranks(copy) for stage in plan.stages) for copy in range(schedule.copies)
    )
    return Placement(ranks, tuple(schedule.rows), plan.microbatches)


def make(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mesh,
    plan: PipelinePlan | None,
    request: Request,
    options: Options,
    trace: Trace,
    training: Training,
    backend: str = "eager",
) -> Made:
    """Everything up to a pipeline that can train; raises what `compile` raises."""
    count = request.microbatches if plan is None else plan.microbatches
    captured = capture_microbatch(model, args, kwargs, count, options, trace)
    compare_ranks({"the captured graph": text_of_graph(captured.graph)}, BatchError, ADVICE)
    if plan is None:
        state = state_bytes_of(training)
        plan = from_first_rank(lambda: plan_evenly(captured, mesh, request, options, trace, state))
    else:
        plan.check(fingerprint(captured.graph), mesh)
        plan = replace(plan, mesh=mesh)
    placement = placement_of(plan)
    _refuse_halves(plan.schedule, placement, backend)
    sources = sources_of(captured, plan, options)
    programs = {f"the program of stage {n}": text_of_program(s) for n, s in enumerate(sources)}
    compare_ranks(programs)
    modules = []
    for number, source in enumerate(sources):
        trace(f"stage_{number}.py", lambda source=source: source)  # type: ignore[misc]
        code = zlib.crc32(source.encode())
        name = printable(f"<autopar {captured.graph.name}, stage {number}, {code:08x}>")
        modules.append(loaded(source, name, backend))
    pipeline = Pipeline(
        modules,
        placement,
        inputs_of(captured),
        local_device(),
        values_of(model, captured),
        training,
        tied={k: v for k, v in captured.parameter_names.items() if k != v},
    )
    return Made(plan, sources, captured, pipeline)


def _refuse_halves(schedule: str, placement: Placement, backend: str) -> None:
    """ProgramError where a backward in two halves would pass through what is compiled."""
    halves = any(action.kind == "W" for row in placement.rows for action in row)
    if halves and backend != "eager":
        raise ProgramError(
            f"stages under the schedule {schedule!r} are not compiled",
            why="its backward comes in two halves, and that of a compiled segment in one",
            todo='pass backend="eager", or a schedule with whole backwards ("1f1b", '
            '"interleaved_1f1b chunks=2")',
        )


def files_of(captured: Captured, plan: PipelinePlan, sources: Sequence[str]) -> dict[str, str]:
    """The text files of a saved pipeline; see `runtime/pipeline/folder.py`."""
    files, names = stage_files(sources)
    groups = len({start for stage in plan.stages for start in stage.starts})
    schedule = schedule_of(plan.schedule, groups, plan.microbatches)
    picture = gantt(simulate(schedule, [StageCost()] * schedule.stages), _COLUMNS)
    program = program_source(
        f"{captured.graph.name} in {len(plan.stages)} stages on {plan.mesh}",
        names,
        placement_of(plan),
        inputs_of(captured),
        [line.plain for line in picture],
    )
    return {
        **files,
        "program.py": program,
        "plan.toml": plan.to_toml(),
        "graph.txt": format_graph(captured.graph),
    }


def inputs_of(captured: Captured) -> dict[str, str]:
    """The inputs of one microbatch, name -> type."""
    return {leaf.target: str(leaf.type) for leaf in captured.graph.leaves("input")}


def values_of(model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """The model's parameters and buffers by the names of the graph's leaves."""
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    found = {
        name: parameter.detach()
        for name, parameter in parameters.items()
        if captured.parameter_names[name] == name
    }
    return {**found, **captured.buffers}

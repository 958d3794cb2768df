"""Plans of calls without training that pass the stages of a pipeline one after another.

A token is computed from the one before, so that the batch is not divided into microbatches: it
passes all stages, and the next token follows. Every stage keeps the caches of its own layers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache

from autopar.errors import ProgramError, ScheduleError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.stage_graphs import alike
from autopar.plan import Plan
from autopar.plan_entries import Prediction
from autopar.planning.options import SCHEDULE, Options
from autopar.planning.pipelines.borders import Messages
from autopar.planning.pipelines.schedule_names import groups_for, schedule_of
from autopar.planning.pipelines.simulated import crossings
from autopar.planning.pipelines.stage_pins import Spoken, spoken, stage_pins
from autopar.planning.pipelines.stages import (
    equal_parts,
    even_ends,
    stage_graphs,
    translated,
)
from autopar.planning.planner import make_plan
from autopar.planning.prices import cost_model, limit_of
from autopar.planning.stored import graphs_of
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan


def one_at_a_time(options: Options, first: Plan | None) -> Options:
    """Returns options for one batch that passes the stages, under a schedule that places them so.

    Args:
        options: give the number of stages.
        first: gives the stages instead, if it is not None.

    Raises:
        ProgramError: every stage has copies on several groups of devices.
    """
    one = replace(options, microbatches=1, schedule=SCHEDULE, global_batch=None, stages=1)
    if first is not None and not first.is_pipeline:
        return one
    if first is None:
        stages, schedule, count = int(options.stages), options.schedule, options.microbatches
        if stages == 1:
            return one
        groups = groups_for(schedule, stages, count)
    else:
        stages, schedule, count = len(first.stages), first.schedule, first.microbatches
        groups = len({start for stage in first.stages for start in stage.starts})
    return replace(one, stages=stages, schedule=_single(schedule, groups, count))


def _single(schedule: str, groups: int, microbatches: int) -> str:
    """Returns a schedule of one microbatch with the stages where another schedule has them."""
    wanted = schedule_of(schedule, groups, microbatches)
    chunks = wanted.stages // groups
    for name in ("gpipe", "zb_v", f"interleaved_1f1b chunks={chunks}"):
        try:
            if schedule_of(name, groups, 1).placement == wanted.placement:
                return name
        except ScheduleError:
            continue
    raise ProgramError(
        f"a program under the schedule {schedule!r} cannot generate",
        why="it has several copies of every stage, and a batch passes only one",
        todo="plan the generation with schedule='1f1b'; after training under this schedule, "
        "program.save_checkpoint(folder), and load_checkpoint(folder) in a session with "
        "schedule='1f1b'",
    )


def plan_in_stages(graph: Graph, mesh: Mesh, options: Options) -> Plan:
    """Plans stages of about equal time on equal parts of the mesh, each within its memory.

    Args:
        graph: normalised, without shares and repeats.
        mesh: all devices.
        options: of planning, from `one_at_a_time`.

    Raises:
        MeshError, StageError, InfeasibleError, PinError: see `plan_stages`.
    """
    stages = int(options.stages)
    groups = groups_for(options.schedule, stages, 1)
    devices = equal_parts(mesh, groups)
    options = replace(options, whole=mesh)
    ends = even_ends(graph, stages, devices[0].mesh, options)
    parts = stage_graphs(graph, ends, Trace(None))
    (placed,) = schedule_of(options.schedule, groups, 1).placement
    pins = stage_pins(graph, parts, [devices[at].mesh for at in placed], options)
    # Stages of one group share its memory.
    room = limit_of(devices[0].mesh, options) * groups / stages
    known: dict[tuple[str, Spoken], tuple[Graph, StagePlan]] = {}
    plans = []
    for number, (part, end, at) in enumerate(zip(parts, (*ends, ""), placed, strict=True)):
        key = (alike(part), spoken(part, pins[number]))
        if key not in known:
            own = replace(options, pins=pins[number], memory=room)
            known[key] = part, make_plan(part, devices[at].mesh, own, Trace(None))
        other, plan = known[key]
        plan = plan if other is part else translated(other, plan, part, pins[number])
        plans.append(replace(plan, end=end, starts=(devices[at].start,)))
    return Plan(fingerprint(graph), mesh, tuple(plans), 1, options.schedule)


def passed(graph: Graph, plan: Plan, options: Options) -> Plan:
    """Returns the plan of a pipeline with the prediction of one pass; other plans have theirs.

    Args:
        graph: of all stages, normalised.
        plan: its plan.
        options: give the prices.
    """
    if not plan.is_pipeline:
        return plan
    options = replace(options, whole=plan.mesh)
    messages = Messages(plan.mesh, cache(lambda mesh: cost_model(mesh, options)))
    graphs = graphs_of(graph, plan)
    groups, held = defaultdict[int, float](float), defaultdict[int, float](float)
    sent = 0.0
    for number, stage in enumerate(plan.stages):
        groups[stage.starts[0]] += stage.predicted.step_seconds
        held[stage.starts[0]] += stage.predicted.peak_bytes
        sent += crossings(graphs, plan, number, messages)[0]
    computed = sum(groups.values())
    seconds = computed + sent
    idle = 1 - computed / (len(groups) * seconds) if seconds else 0.0
    return replace(plan, predicted=Prediction(seconds, max(held.values()), idle))

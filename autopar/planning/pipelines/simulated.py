"""Simulates a pipeline's plan: first every stage, then the schedule with the stages' figures.

A stage's forward and backward of one microbatch come from the simulation of its step; if a schedule
splits the backward, each half counts the same. Gradient synchronisation and the optimizer take
their time where the rows have them: after the last microbatch, if the schedule is synchronous.
Values go from stage to stage by `ir/crossing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.cost.device import device
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel
from autopar.cost.overlap import side_by_side
from autopar.errors import PlanError
from autopar.inter_op.complete import complete
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.steady_state import steady
from autopar.intra_op.work.kernel_work import works
from autopar.ir.crossing import Side
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.stage_graphs import alike
from autopar.plan import Plan
from autopar.plan_entries import Prediction
from autopar.planning.options import Options
from autopar.planning.pipelines.borders import Messages
from autopar.planning.pipelines.gradient_sums import waited_sums
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.planning.pipelines.streaming import copies_of, late_sums, taken
from autopar.planning.pipelines.wiring import wiring_of
from autopar.planning.prices import cost_model, host_of
from autopar.simulate import (
    covered,
    fixed_bytes,
    issued_seconds,
    kept_bytes,
    run,
    settings_on,
    tasks,
)
from autopar.stage_plan import StagePlan

Priced = AnalyticModel | MeasuredModel


@dataclass(frozen=True)
class StageFigures:
    """The figures of a stage on its devices.

    Attributes:
        forward, backward: seconds of one microbatch.
        gradients: seconds of gradient synchronisation for each update, if nothing else runs.
        slowdown: factor by which kernels and that synchronisation slow down while both run.
        optimizer: seconds of the optimizer.
        ahead: seconds of gathering updated parameters beside the next step's forward.
        fixed: bytes of parameters, gradients and optimizer state on a device.
        kept: bytes that a microbatch keeps until its backward.
        transient: additional bytes while a microbatch computes.
        arriving: seconds of the messages of one microbatch from earlier stages.
        returning: seconds of the messages of the gradients that it sends back.
        again: seconds of the recomputation in `backward`; both halves of a split backward need it.
    """

    forward: float
    backward: float
    gradients: float
    slowdown: float
    optimizer: float
    fixed: float
    kept: float
    transient: float
    arriving: float = 0.0
    returning: float = 0.0
    again: float = 0.0
    ahead: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """The simulated step of a pipeline.

    Attributes:
        stages: in execution order.
        timeline: the actions of each group of ranks; without flushes, of a few periods from the
            first microbatch on.
        seconds: seconds of the whole step, or of a period in the steady state.
        bubble: fraction of that time in which ranks are idle, without the update at the end of a
            step.
        ranks: the global ranks of each group.
        held: the stages of each group.
        memory: peak bytes on a device of each group.
    """

    stages: tuple[StageFigures, ...]
    timeline: Timeline
    seconds: float
    bubble: float
    ranks: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    memory: tuple[float, ...]


def simulated(graphs: Sequence[Graph], plan: Plan, options: Options) -> Simulated:
    """Simulates a step of a pipeline.

    Args:
        graphs: graphs of the stages, from `stage_graphs`.
        plan: the pipeline's.
        options: give rules and prices.

    Raises:
        ScheduleError: the plan's schedule does not exist for its sizes.
        PlanError: the plan has another number of stages than its schedule.
        UnknownDeviceError, CostError: a mesh cannot be priced.
    """
    groups = sorted({(start, s.mesh.size) for s in plan.stages for start in s.starts})
    schedule = schedule_of(plan.schedule, len(groups), plan.microbatches)
    if schedule.stages != len(plan.stages):
        raise PlanError(
            f"the plan has {len(plan.stages)} stages",
            why=f"the schedule {plan.schedule!r} has {schedule.stages}",
            todo="correct the schedule, or plan again",
        )
    options = replace(options, whole=plan.mesh)
    prices = cache(lambda mesh: cost_model(mesh, options))
    known: dict[tuple[str, Mesh, tuple[object, ...]], StageFigures] = {}
    figures, messages = [], Messages(plan.mesh, prices)
    for number, (graph, stage) in enumerate(zip(graphs, plan.stages, strict=True)):
        stage = replace(stage, microbatches=taken(schedule))  # gradients of others are used up
        # Stages that differ in names only have the same figures.
        key = (alike(graph), stage.mesh, tuple(map(str, stage.nodes.values())))
        if key not in known:
            known[key] = stage_figures(graph, stage, options, prices(stage.mesh))
        there, back = crossings(graphs, plan, number, messages)
        figures.append(replace(known[key], arriving=there, returning=back))
    wiring = wiring_of(graphs, [stage.mesh for stage in plan.stages])
    costs = _costs(graphs, plan, schedule, figures, prices)
    step = complete(schedule, wiring)
    hops = [s.arriving for s in figures[1:]], [s.returning for s in figures[1:]]
    if schedule.flushes:
        timeline = simulate(step, costs, *hops)
        seconds, bubble = timeline.seconds, timeline.bubble
    else:
        timeline = simulate(step.unrolled(schedule.warm_up + 1), costs, *hops)
        seconds, bubble = steady(step, costs, *hops)
    ranks, memory, copies = [], [], copies_of(schedule, wiring)
    for stages, kept in zip(schedule.holds, timeline.peak_bytes, strict=True):
        number, copy = stages[0]
        ranks.append(plan.stages[number].ranks(copy))
        own = [figures[number] for number, _ in stages]
        further = sum(copies[n].in_plan(graphs[n], plan.stages[n]) for n, _ in stages)
        alive = sum(s.fixed for s in own) + further + kept + max(s.transient for s in own)
        memory.append(alive / (1 - graphs[number].execution.reserve))
    held = tuple(tuple(number for number, _ in one) for one in schedule.holds)
    return Simulated(tuple(figures), timeline, seconds, bubble, tuple(ranks), held, tuple(memory))


def _costs(
    graphs: Sequence[Graph],
    plan: Plan,
    schedule: Schedule,
    figures: Sequence[StageFigures],
    prices: Callable[[Mesh], Priced],
) -> list[StageCost]:
    """Returns the costs of the stages' actions."""
    costs = []
    for graph, stage, own in zip(graphs, plan.stages, figures, strict=True):
        half = schedule.half_backward(own.backward, own.again)
        # The first group of microbatches: as many as there are groups of ranks.
        first = own.forward * min(len(schedule.rows), schedule.microbatches)
        after = side_by_side(first, own.ahead, own.slowdown) - first
        cost = StageCost(own.forward, half, half, own.kept, update=own.optimizer + after)
        if schedule.pending:
            price = prices(stage.mesh).collective
            now, late = late_sums(graph, stage, schedule.outer, price)
            cost = cost._replace(update=cost.update + now, sums=late)
        elif not schedule.flushes:  # another stage may update in between: its own backward alone
            after = side_by_side(own.backward, own.gradients, own.slowdown) - own.backward
            cost = cost._replace(update=cost.update + after)
        costs.append(cost)
    if not schedule.flushes:
        return costs
    waited = waited_sums(
        schedule, costs, [own.gradients for own in figures], [own.slowdown for own in figures]
    )
    return [
        cost._replace(update=cost.update + seconds)
        for cost, seconds in zip(costs, waited, strict=True)
    ]


def predicted(graphs: Sequence[Graph], plan: Plan, options: Options) -> Prediction:
    """Returns a plan's prediction: seconds of a step, bubble fraction, and peak bytes.

    Arguments and errors are those of `simulated`.
    """
    step = simulated(graphs, plan, options)
    return Prediction(step.seconds, max(step.memory), step.bubble)


def stage_figures(graph: Graph, plan: StagePlan, options: Options, model: Priced) -> StageFigures:
    """Simulates one stage on one microbatch under some prices."""
    chip = device(plan.mesh)
    usual = settings_on(plan.mesh.device, graph.execution, host_of(model))
    settings = replace(usual, overlap=frozenset(), ahead=False)
    step = tasks(graph, plan, works(graph, plan, options.table), model, settings)
    timeline = run(step, model, chip.slowdown)
    issued = issued_seconds(step, settings.host)
    beside = {"gradient"} | ({"update"} if usual.ahead else set())
    own = [span for span in timeline.spans if span.task.cause not in beside]
    seconds = {
        phase: covered(span for span in own if span.task.phase == phase)
        for phase in ("forward", "backward", "optimizer")
    }
    gradients = sum(s.seconds for s in timeline.spans if s.task.cause == "gradient")
    ahead = sum(s.seconds for s in timeline.spans if s.task.cause in beside - {"gradient"})
    again = covered(span for span in own if span.task.is_recomputation)
    fixed, kept = fixed_bytes(step), kept_bytes(step)
    overlapped = "gradient" in usual.overlap
    return StageFigures(
        max(seconds["forward"], issued["forward"]),
        max(seconds["backward"], issued["backward"]),
        gradients,
        chip.slowdown if overlapped else 2.0,
        seconds["optimizer"],
        fixed,
        kept,
        max(timeline.memory.peak - fixed - kept, 0.0),
        again=again,
        ahead=ahead,
    )


def crossings(
    graphs: Sequence[Graph], plan: Plan, reader: int, messages: Messages
) -> tuple[float, float]:
    """Returns the seconds of receiving a microbatch's values and of returning their gradients.

    Gathers among the receiving devices belong to their stage's step.
    """
    there = back = 0.0
    target = plan.stages[reader]
    for leaf in graphs[reader].leaves("received"):
        producer = next(n for n in range(reader) if leaf.target in dict(graphs[n].outputs))
        source = plan.stages[producer]
        if source.starts == target.starts:
            continue
        node = dict(graphs[producer].outputs)[leaf.target]
        produced = source.nodes[graphs[producer].template[node]].results[0][1]
        read = target.nodes[graphs[reader].template[leaf.name]].results[0][1]
        sides = (
            Side(source.mesh, source.ranks(), produced),
            Side(target.mesh, target.ranks(), read),
        )
        directions = (sides, sides[::-1]) if leaf.requires_grad else (sides,)
        seconds = []
        for one, other in directions:
            nbytes = messages.busiest(leaf.type, one, other)
            seconds.append(messages.between(source.starts[0], target.starts[0], nbytes))
        there += seconds[0]
        back += sum(seconds[1:])
    return there, back

"""Searches for the fastest pipeline: layers, sub-meshes, microbatches and schedule together.

`inter_op.partition` searches by closed forms of the schedules, and `stage_costs` prices its stages.
The best pipelines are then simulated action by action, and the fastest of these is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product

from autopar.cost.device import device
from autopar.errors import InfeasibleError
from autopar.inter_op.complete import with_sends
from autopar.inter_op.laws import law
from autopar.inter_op.partition import partition
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import candidates, schedule
from autopar.inter_op.search_task import Transfer
from autopar.inter_op.stage_values import (
    Candidate,
    Law,
    Pipeline,
    Progress,
    Stage,
    StageSearchResult,
)
from autopar.inter_op.steady_state import steady
from autopar.inter_op.submeshes import SubMesh, place_stages, submeshes
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes
from autopar.passes.observations import NOTHING, Observations
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.pipelines.borders import Borders
from autopar.planning.pipelines.equally_fast import simplest_first
from autopar.planning.pipelines.layered import Layered, runs
from autopar.planning.pipelines.parallel_costs import ParallelCosts
from autopar.planning.pipelines.schedule_names import read_schedule
from autopar.planning.pipelines.stage_costs import StageCosts
from autopar.planning.pipelines.stages import Devices, plan_stages
from autopar.planning.pipelines.streaming import FLUSHED, Streamed, taken
from autopar.planning.pipelines.variants import AGAIN, InFlight
from autopar.planning.prices import by_kind
from autopar.planning.trace import Trace
from autopar.planning.workers import Workers

SIMULATED = 24  # pipelines to simulate at most
_SURE = 8  # pipelines to simulate in any case
INEXACT = 0.03  # largest fraction by which a simulation is faster than its closed form
# Closed forms of pipelines with fewer microbatches are too low by some per cent: they do not know
# how unequal chunks and messages wait for one another while the pipeline fills.
FEW, TOO_LOW = 4, 0.03
# No operator is more efficient on less work; the margin allows for rounding.
_OPTIMISM = 0.98
# Fraction of memory that pricing leaves free for buffers that only the simulation counts.
SPARE = 0.02
_FIGURES = 20  # a rank's memory is rounded up to 1/20 of a stage's
# All schedules but GPipe keep about as much on a rank as one microbatch keeps of all layers.
_HELD = 2.0


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        pipeline: the fastest by simulation, or a simpler one that is equally fast within the error
            of prices.
        seconds: simulated seconds of its step.
        timeline: timeline of its actions.
        others: the other simulated pipelines with their seconds, the fastest first.
        closed_form: the result of the search by closed forms.
        ends: the last operator of every layer; () if the model has more layers than were traced,
            until a caller adds them.
    """

    pipeline: Pipeline
    seconds: float
    timeline: Timeline
    others: tuple[tuple[Pipeline, float], ...]
    closed_form: StageSearchResult
    ends: tuple[str, ...] = ()


def fastest(every: Sequence[SearchResult]) -> SearchResult:
    """Returns the fastest result of several searches, with all other pipelines as runners-up."""
    best = min(every, key=lambda one: one.seconds)
    rest = [(one.pipeline, one.seconds) for one in every if one is not best]
    rest += [pair for one in every for pair in one.others]
    return replace(best, others=tuple(sorted(rest, key=lambda pair: pair[1])))


def search(
    layered: Callable[[int], Layered],
    mesh: Mesh,
    microbatches: Sequence[int],
    options: Options,
    memory: float | Mapping[str, float],
    *,
    schedules: Sequence[str] = (),
    most_stages: int | None = None,
    shapes: int = 1,
    most_calls: int | None = None,
    patience: int | None = None,
    gap: float = 0.0,
    scaling: bool = False,
    near: float = 0.0,
    progress: Callable[[Progress], None] | None = None,
    workers: Workers | None = None,
    streamed: Streamed = FLUSHED,
) -> SearchResult:
    """Returns the fastest pipeline of a model on a cluster.

    Args:
        layered: number of microbatches -> the model on one of them.
        mesh: the cluster.
        microbatches: numbers of microbatches to choose from.
        options: options of planning.
        memory: bytes of a device, of all or by `Mesh.kind`.
        schedules: names with options to choose from; () for all candidates, see
            `inter_op/schedules/`. On unlike devices only those with one stage a rank are used.
        most_stages, most_calls, patience, gap, scaling, near, progress: see `partition`.
        shapes: number of logical shapes of a sub-mesh to try in any case; see `StageCosts`.
        workers: processes that price stages, to which `options` can be sent; None for this one
            only.
        streamed: the schedule to choose, if it is asynchronous.

    Raises:
        InfeasibleError: nothing fits into memory.
        ScheduleError: a schedule is unknown.
        MeshError, UnknownDeviceError, CostError: the cluster cannot be divided or priced.
    """
    schedules = schedules or candidates()
    laws = [law(name, **own) for name, own in map(read_schedule, schedules)]
    laws = [one for one in laws if one.chunks == 1 or not mesh.unlike]
    limits = by_kind(memory, mesh)
    fewest, room = min(microbatches), {k: (1 - SPARE) * each for k, each in limits.items()}
    most, held = _power(max(microbatches)), math.inf if "gpipe" in schedules else _HELD
    layers = layered(fewest)
    kinds = layers.kinds
    parts = submeshes(mesh)
    ranks = {mesh.size // part.size for part in parts}
    make = partial(
        StageCosts, mesh=mesh, options=options, memory=room, most=most,
        shapes=shapes, streamed=streamed,
        flight=InFlight(held, _kept(laws, [n for n in ranks if n <= len(kinds)])),
    )  # fmt: skip
    together = ParallelCosts(make, layered, workers or Workers(0))
    costs = together.costs
    costs.know(fewest, layers)
    transfer = Borders(layers, mesh, options).between(fewest)

    @cache
    def alone(first: int, last: int, part: int) -> tuple[float, ...]:
        total = [0.0] * 3
        for kind, number in runs(kinds[first : last + 1]):
            for at, figure in enumerate(costs.alone(kind, fewest, part)):
                total[at] += number * figure
        return tuple(total)

    def lower_bound(first: int, last: int, part: SubMesh, count: int) -> Candidate:
        seconds, fixed, each = (figure / part.size for figure in alone(first, last, part.part))
        share = fewest / count
        kept = each * share if options.recompute == "none" else 0.0  # recomputed blocks keep little
        return Candidate(_OPTIMISM * seconds * share, fixed=fixed, per_microbatch=kept)

    try:
        partitioned = partition(
            kinds,
            parts,
            laws=laws,
            microbatches=microbatches,
            memory=[room[part.meshes[0].kind] for part in parts],
            stage_cost=together,
            ahead=together.ahead,
            again=AGAIN if options.recompute == "auto" else 0.0,
            lower_bound=lower_bound,
            transfer=transfer,
            borders=list(pairwise(kinds)),
            most_stages=most_stages,
            most_calls=most_calls,
            patience=patience,
            gap=gap,
            scaling=scaling,
            near=near,
            progress=progress,
            probes=_usual(parts, microbatches, layers.samples * fewest),
            doubts={count: TOO_LOW for count in microbatches if count < FEW},
        )
    except InfeasibleError as error:
        each = " or ".join(map(format_bytes, dict.fromkeys(limits.values())))
        error.why += f"; {SPARE:.0%} of {each} is kept free"
        raise
    played: list[tuple[float, Timeline, Pipeline]] = []
    for number, pipeline in enumerate((partitioned.best, *partitioned.others[: SIMULATED - 1])):
        if number >= _SURE and pipeline.seconds * (1 - INEXACT) > min(row[0] for row in played):
            break
        played.append((*simulate_pipeline(pipeline, transfer), pipeline))
    played.sort(key=lambda row: row[0])
    if options.calibration is None and not mesh.unlike:  # errors are known of one kind of device
        played = simplest_first(played, device(mesh))
    seconds, timeline, best = played[0]
    others = tuple((pipeline, simulated) for simulated, _, pipeline in played[1:])
    ends = () if layers.more else tuple(layers.layers.ends)
    return SearchResult(best, seconds, timeline, others, partitioned, ends)


def plan_of(
    searched: SearchResult,
    graph: Graph,
    mesh: Mesh,
    options: Options,
    trace: Trace,
    workers: Workers | None = None,
    observed: Observations = NOTHING,
) -> Plan:
    """Returns the plan of a search's result: each stage is planned again as it will run.

    Args:
        searched: the result of the search, with the ends of all layers.
        graph: the whole model on one microbatch, normalised.
        mesh: the cluster.
        options: as of the search.
        trace: writes intermediate values.
        workers: processes that plan stages.
        observed: of the whole model.

    Raises:
        InfeasibleError: a stage's simulated step does not fit after all.
    """
    pipeline, ends = searched.pipeline, searched.ends
    lasts = sorted(chunk.last for stage in pipeline.stages for chunk in stage.chunks)
    starts = place_stages(mesh, [stage.submesh for stage in pipeline.stages])
    groups = [
        Devices(Mesh.parse(_usual_label(stage)), start)
        for stage, start in zip(pipeline.stages, starts, strict=True)
    ]
    cuts = [ends[last] for last in lasts[:-1]]
    planned = partial(
        plan_stages, graph, cuts, groups, mesh, pipeline.microbatches, pipeline.schedule,
        options=options, trace=trace, workers=workers, observed=observed,
    )  # fmt: skip
    chunks = sorted(
        (chunk.first, chunk.candidate.recompute, rank_stages)
        for stage in pipeline.stages
        for chunk, rank_stages in zip(stage.chunks, _rank_stages(stage), strict=True)
    )
    if options.recompute == "auto":
        recompute, rank_stages = [row[1] for row in chunks], [row[2] for row in chunks]
        try:
            return planned(recompute=recompute, rank_stages=rank_stages)
        except InfeasibleError:
            pass  # the simulated step needs more than its price
    return planned()


def _rank_stages(stage: Stage) -> list[float]:
    """Returns a rank's memory in units of what each of its chunks keeps, rounded up."""
    candidates = [chunk.candidate for chunk in stage.chunks]
    kept = [candidate.kept(stage.in_flight) for candidate in candidates]
    return [math.ceil(_FIGURES * sum(kept) / own) / _FIGURES for own in kept]


def _usual_label(stage: Stage) -> str:
    """Returns the logical mesh of most chunks of a rank, on which all of them are planned."""
    labels = [chunk.candidate.label for chunk in stage.chunks]
    return max(dict.fromkeys(labels), key=labels.count)


def simulate_pipeline(pipeline: Pipeline, transfer: Transfer) -> tuple[float, Timeline]:
    """Simulates a pipeline's actions under the costs of its stages and transfers.

    Returns:
        The seconds of a step, and its timeline without the update at its end; of a schedule without
        flushes, those of a period in the steady state, with its updates.
    """
    name, own = read_schedule(pipeline.schedule)
    count = pipeline.microbatches
    rows = schedule(name, len(pipeline.stages), count, **own)
    places = sorted(
        (chunk.first, at, number)
        for at, stage in enumerate(pipeline.stages)
        for number, chunk in enumerate(stage.chunks)
    )
    order = [
        (pipeline.stages[at].chunks[number], pipeline.stages[at].submesh)
        for _, at, number in places
    ]
    updates = 0 if rows.flushes else count // taken(rows)
    halves = [
        rows.half_backward(chunk.candidate.backward, chunk.candidate.again) for chunk, _ in order
    ]
    stage_costs = [
        StageCost(
            chunk.candidate.forward,
            half,
            half,
            chunk.candidate.per_microbatch,
            update=chunk.candidate.once / updates if updates else 0.0,
            sums=chunk.candidate.sums,
        )
        for (chunk, _), half in zip(order, halves, strict=True)
    ]
    hops = [
        transfer(behind.first, before_part, behind_part, count) / 2
        for (_, before_part), (behind, behind_part) in pairwise(order)
    ]
    timeline = simulate(rows, stage_costs, hops)
    if rows.flushes:
        return timeline.seconds + max(stage.once for stage in pipeline.stages), timeline
    return steady(with_sends(rows), stage_costs, hops)[0], timeline


def _kept(laws: Sequence[Law], sizes: Sequence[int]) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Returns the microbatches in flight of even pipelines, as `StageCosts` takes them.

    They are the numbers of the first rank, and with several chunks also of the last.
    """
    levels: dict[tuple[int, int, int], set[int]] = {}
    for one, ranks in product(laws, sizes):
        count = 2 * ranks  # more microbatches change nothing
        if one.fits(ranks, count):
            key = ranks, ranks * one.chunks // one.copies, one.chunks
            ends = (ranks,) if one.chunks == 1 else (1, ranks)
            kept = {math.ceil(one.in_flight(rank, ranks, count)) for rank in ends}
            levels[key] = levels.get(key, set()) | kept
    return {key: tuple(sorted(kept)) for key, kept in levels.items()}


def _usual(
    parts: Sequence[SubMesh], microbatches: Sequence[int], batch: int
) -> list[tuple[SubMesh, int]]:
    """Returns sub-meshes, other than the whole cluster, that have four devices for each sample."""
    return [
        (part, count)
        for part in parts
        for count in microbatches
        if batch and batch // count * 4 == part.size != parts[-1].size
    ]


def _power(number: int) -> int:
    """Returns the largest power of two up to a number, at most 256."""
    return min(1 << (number.bit_length() - 1), 256)

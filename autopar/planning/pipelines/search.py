"""The search for a pipeline: layers, sub-meshes, microbatches and schedule, chosen together.

`inter_op.partition` searches by the schedules' formulas; `stage_costs` answers it. The pipelines
that come out best are then simulated action by action, and the fastest of these is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product

from autopar.errors import InfeasibleError
from autopar.inter_op.complete import complete
from autopar.inter_op.laws import law
from autopar.inter_op.layers import find_layers
from autopar.inter_op.partition import Transfer, partition
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule_time import StageCost, simulate, steady
from autopar.inter_op.schedules import candidates, schedule
from autopar.inter_op.stage_values import Candidate, Found, Law, Pipeline, Progress, Stage
from autopar.inter_op.submeshes import Cluster, SubMesh, place, submeshes
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes
from autopar.passes.normalise import FINDING, prepare
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.pipelines.layered import Layered, runs
from autopar.planning.pipelines.parallel_costs import Together
from autopar.planning.pipelines.schedule_names import read_schedule
from autopar.planning.pipelines.stage_costs import StageCosts
from autopar.planning.pipelines.stages import Devices, plan_stages, weights
from autopar.planning.pipelines.variants import AGAIN
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.planning.workers import Workers

SIMULATED = 24  # of the best pipelines are played through
_SURE = 8  # of these in any case
INEXACT = 0.03  # by which simulated seconds are below those of a formula, at most
# No operator is more efficient on less work; what is priced so may still differ by rounding.
_OPTIMISM = 0.98
# Part of the memory that stages are not priced for: their simulated steps may need as much more.
_SPARE = 0.02
_FIGURES = 20  # in so many parts of one it is said how much a rank keeps
# Schedules but GPipe keep in flight on a rank about what one microbatch keeps of all layers.
_HELD = 2.0


@dataclass(frozen=True)
class Searched:
    """What a search found.

    Attributes:
        pipeline: the fastest by simulation.
        seconds: of its step, simulated.
        timeline: of its actions.
        others: pipelines with their simulated seconds, the fastest first.
        found: the search by formulas.
    """

    pipeline: Pipeline
    seconds: float
    timeline: Timeline
    others: tuple[tuple[Pipeline, float], ...]
    found: Found


def search(
    layered: Callable[[int], Layered],
    mesh: Mesh,
    microbatches: Sequence[int],
    options: Options,
    memory: float,
    *,
    schedules: Sequence[str] = (),
    most_stages: int | None = None,
    shapes: int = 1,
    most_calls: int | None = None,
    patience: int | None = None,
    gap: float = 0.0,
    scaling: bool = False,
    progress: Callable[[Progress], None] | None = None,
    workers: Workers | None = None,
) -> Searched:
    """The fastest pipeline of a model on a cluster.

    Args:
        layered: number of microbatches -> the model on one of them.
        mesh: the cluster.
        microbatches: numbers of them to choose from.
        options: of planning.
        memory: bytes of a device.
        schedules: names with options, to choose from; () for all candidates, see
            `inter_op/schedules/`.
        most_stages, most_calls, patience, gap, scaling, progress: see `partition`.
        shapes: how many logical shapes of a sub-mesh are tried in any case, see `StageCosts`.
        workers: processes that price stages; `options` can be sent there. None: this one alone.

    Raises:
        InfeasibleError: nothing fits into memory.
        ScheduleError: there is no such schedule.
        MeshError, UnknownDeviceError, CostError: the cluster cannot be divided or priced.
    """
    schedules = schedules or candidates()
    laws = [law(name, **own) for name, own in map(read_schedule, schedules)]
    fewest, room = min(microbatches), (1 - _SPARE) * memory
    most, held = _power(max(microbatches)), math.inf if "gpipe" in schedules else _HELD
    layers = layered(fewest)
    kinds = layers.kinds
    parts = submeshes(mesh)
    ranks = {mesh.size // part.size for part in parts}
    make = partial(
        StageCosts, mesh=mesh, options=options, memory=room, most=most,
        shapes=shapes, held=held, kept=_kept(laws, [n for n in ranks if n <= len(kinds)]),
    )  # fmt: skip
    together = Together(make, layered, workers or Workers(0))
    costs = together.costs
    costs.know(fewest, layers)
    transfer = Borders(layers, mesh, options).between(fewest)

    def lower_bound(first: int, last: int, part: SubMesh, count: int) -> Candidate:
        total = [0.0] * 3
        for kind, number in runs(kinds[first : last + 1]):
            for at, figure in enumerate(costs.alone(kind, fewest)):
                total[at] += number * figure
        seconds, fixed, each = (figure / part.size for figure in total)
        share = fewest / count
        kept = each * share if options.recompute == "none" else 0.0  # what enters blocks is little
        return Candidate(_OPTIMISM * seconds * share, fixed=fixed, per_microbatch=kept)

    try:
        found = partition(
            kinds,
            parts,
            laws=laws,
            microbatches=microbatches,
            memory=room,
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
            progress=progress,
            probes=_usual(parts, microbatches, layers.samples * fewest),
        )
    except InfeasibleError as error:
        error.why += f"; of {format_bytes(memory)} a part, {_SPARE:.0%}, is spared"
        raise
    played: list[tuple[float, Pipeline, Timeline]] = []
    for number, pipeline in enumerate((found.best, *found.others[: SIMULATED - 1])):
        if number >= _SURE and pipeline.seconds * (1 - INEXACT) > min(row[0] for row in played):
            break
        timeline, seconds = play(pipeline, transfer)
        seconds += max(stage.once for stage in pipeline.stages)
        played.append((seconds, pipeline, timeline))
    played.sort(key=lambda row: row[0])
    seconds, best, timeline = played[0]
    others = tuple((pipeline, simulated) for simulated, pipeline, _ in played[1:])
    return Searched(best, seconds, timeline, others, found)


def plan_of(
    searched: Searched,
    graph: Graph,
    mesh: Mesh,
    options: Options,
    trace: Trace,
    workers: Workers | None = None,
) -> Plan:
    """The plan of what a search found: each stage planned once more, as it will run.

    Args:
        searched: the search.
        graph: the whole model on one microbatch, normalised.
        mesh: the cluster.
        options: as of the search.
        trace: keeps what is planned.
        workers: processes that plan stages.

    Raises:
        InfeasibleError: a stage's simulated step does not fit after all.
    """
    pipeline = searched.pipeline
    whole = prepare(graph, passes=FINDING)
    seconds, _ = weights(graph, whole, mesh, options)
    ends = find_layers(whole, seconds).ends
    lasts = sorted(chunk.last for stage in pipeline.stages for chunk in stage.chunks)
    starts = place(Cluster.of(mesh), [stage.submesh.size for stage in pipeline.stages])
    groups = [
        Devices(Mesh.parse(_usual_label(stage)), start)
        for stage, start in zip(pipeline.stages, starts, strict=True)
    ]
    cuts = [ends[last] for last in lasts[:-1]]
    made = partial(
        plan_stages, graph, cuts, groups, mesh, pipeline.microbatches, pipeline.schedule,
        options=options, trace=trace, workers=workers,
    )  # fmt: skip
    chunks = sorted(
        (chunk.first, chunk.candidate.recompute, beside)
        for stage in pipeline.stages
        for chunk, beside in zip(stage.chunks, _beside(stage), strict=True)
    )
    if options.recompute == "auto":
        recompute, beside = [row[1] for row in chunks], [row[2] for row in chunks]
        try:
            return made(recompute=recompute, beside=beside)
        except InfeasibleError:
            pass  # its simulated step needs more than it is priced at
    return made()


def _beside(stage: Stage) -> list[float]:
    """What a rank keeps, in units of what each of its chunks keeps; few different figures."""
    ways = [chunk.candidate for chunk in stage.chunks]
    kept = [way.kept(stage.in_flight) for way in ways]
    return [math.ceil(_FIGURES * sum(kept) / own) / _FIGURES for own in kept]


def _usual_label(stage: Stage) -> str:
    """The logical mesh of most chunks of a rank; all of them are planned on it."""
    labels = [chunk.candidate.label for chunk in stage.chunks]
    return max(dict.fromkeys(labels), key=labels.count)


def play(pipeline: Pipeline, transfer: Transfer) -> tuple[Timeline, float]:
    """The pipeline's actions in time, under its stages' costs and transfers, and seconds of a step.

    Of a schedule that does not flush a step is a period of the steady state.
    """
    name, own = read_schedule(pipeline.schedule)
    count = pipeline.microbatches
    made = schedule(name, len(pipeline.stages), count, **own)
    places = sorted(
        (chunk.first, at, number)
        for at, stage in enumerate(pipeline.stages)
        for number, chunk in enumerate(stage.chunks)
    )
    order = [
        (pipeline.stages[at].chunks[number], pipeline.stages[at].submesh)
        for _, at, number in places
    ]
    stage_costs = [
        StageCost(
            chunk.candidate.forward,
            chunk.candidate.backward / 2,
            chunk.candidate.backward / 2,
            chunk.candidate.per_microbatch,
        )
        for chunk, _ in order
    ]
    hops = [
        transfer(behind.first, before_part, behind_part, count) / 2
        for (_, before_part), (behind, behind_part) in pairwise(order)
    ]
    timeline = simulate(made, stage_costs, hops)
    if made.flushes:
        return timeline, timeline.seconds
    return timeline, steady(made, complete(made), stage_costs, hops)[0]


class Borders:
    """Seconds that one microbatch's values take over a border, and their gradients back.

    Args:
        layered: the model on one microbatch.
        mesh: the cluster.
        options: whose prices hold.
    """

    def __init__(self, layered: Layered, mesh: Mesh, options: Options) -> None:
        self.layered, self.mesh = layered, mesh
        self.cluster, self.model = Cluster.of(mesh), cost_model(mesh, options)
        self.nbytes = cache(self._nbytes)

    def between(self, microbatches: int) -> Transfer:
        """Transfers in any number of microbatches, `layered` being on one of so many."""
        kinds = self.layered.kinds

        def transfer(border: int, before: SubMesh, behind: SubMesh, count: int) -> float:
            pair = (kinds[border - 1], kinds[border])
            return self.seconds(pair, before, behind) * microbatches / count

        return transfer

    def _nbytes(self, pair: tuple[Hashable, Hashable]) -> tuple[float, float]:
        """Bytes of the values that cross between two kinds of layers, and of their gradients."""
        layers = self.layered.layers
        at = [*pairwise(layers.kinds)].index(pair)  # type: ignore[arg-type]
        return layers.forward[at], layers.backward[at]

    def seconds(self, pair: tuple[Hashable, Hashable], before: SubMesh, behind: SubMesh) -> float:
        """Every element crosses once, spread over the devices of the smaller side."""
        inside = before.size + behind.size <= self.cluster.devices
        axis = self.mesh.names[-1 if inside else 0]
        lanes = min(before.size, behind.size)
        return sum(
            self.model.collective(Collective("send", (axis,), int(nbytes / lanes)))
            for nbytes in self.nbytes(pair)
            if nbytes
        )


def _kept(laws: Sequence[Law], sizes: Sequence[int]) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """What `StageCosts` is told of even pipelines of so many ranks: what the first one keeps, and
    of several chunks the last one.
    """
    found: dict[tuple[int, int, int], set[int]] = {}
    for one, ranks in product(laws, sizes):
        count = 2 * ranks  # more microbatches change nothing
        if one.fits(ranks, count):
            key = ranks, ranks * one.chunks // one.copies, one.chunks
            ends = (ranks,) if one.chunks == 1 else (1, ranks)
            kept = {math.ceil(one.in_flight(rank, ranks, count)) for rank in ends}
            found[key] = found.get(key, set()) | kept
    return {key: tuple(sorted(kept)) for key, kept in found.items()}


def _usual(
    parts: Sequence[SubMesh], microbatches: Sequence[int], batch: int
) -> list[tuple[SubMesh, int]]:
    """Sub-meshes, not the whole cluster, on which each sample has four devices of one host."""
    return [
        (part, count)
        for part in parts
        for count in microbatches
        if batch and batch // count * 4 == part.size != parts[-1].size
    ]


def _power(number: int) -> int:
    """The largest power of two up to a number, 256 at most."""
    return min(1 << (number.bit_length() - 1), 256)

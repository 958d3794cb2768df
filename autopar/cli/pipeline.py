"""`autopar plan --global-batch`: stages, sub-meshes, microbatches and schedule, chosen together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict

from rich.console import RenderableType
from rich.table import Table

from autopar.cli.common.model_options import Wanted, capture_model, is_data
from autopar.errors import GraphError
from autopar.inter_op.layers import find_layers
from autopar.inter_op.stage_values import Pipeline, Progress, Stage
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes, format_seconds
from autopar.passes.deepen import LEAST, deepen
from autopar.passes.rebatch import rebatch
from autopar.passes.shares import remove_shares
from autopar.pipeline_plan import PipelinePlan
from autopar.planning.pipelines.layered import Layered
from autopar.planning.pipelines.search import SCHEDULES, Searched, plan_of, search
from autopar.planning.pipelines.stages import weights
from autopar.planning.single import Options, Trace
from autopar.planning.workers import Workers
from autopar.zoo.load import depth


class Effort(TypedDict):
    """Arguments of `search`."""

    most_calls: int
    patience: int
    gap: float
    shapes: int


FEWEST = 4  # microbatches that are worth a pipeline
# Devices for which the search takes longer than a process takes to start.
MANY = 64
# How long is looked, see `search`. On many devices bounds are far below all pipelines: no proof is
# looked for.
THOROUGH: Effort = {"most_calls": 80, "patience": 24, "gap": 0.003, "shapes": 3}
QUICK: Effort = {"most_calls": 80, "patience": 0, "gap": 0.003, "shapes": 1}
_TRACED = (2, 4)  # samples of a microbatch


def plan_pipeline(
    wanted: Wanted,
    mesh: Mesh,
    batch: int,
    options: Options,
    memory: float,
    trace: Trace,
    stage: Callable[[str], None],
) -> tuple[Searched, PipelinePlan]:
    """The fastest pipeline for a global batch, with what else was looked at.

    Raises:
        InfeasibleError: no pipeline fits into memory.
    """
    with Workers(None if mesh.size >= MANY else 0) as workers:
        model = OnMicrobatches(wanted, batch, mesh, options)
        found = find_pipeline(model, memory, stage, workers)
        stage("planning the stages")
        graph = model.whole(found.pipeline.microbatches)
        made = plan_of(found, graph, mesh, options, trace, workers=workers)
    return found, replace(made, model={**wanted.table(), "batch": batch})


def find_pipeline(
    model: OnMicrobatches,
    memory: float,
    stage: Callable[[str], None],
    workers: Workers | None = None,
) -> Searched:
    """What the search finds; raises as `plan_pipeline`."""
    batch, mesh = model.batch, model.mesh
    counts = [batch // size for size in _sizes(batch) if batch // size >= FEWEST] or [batch]

    def told(progress: Progress) -> None:
        known = f"best {format_seconds(progress.seconds)}" if progress.seconds < 1e300 else "none"
        stage(f"{progress.doing}: {progress.calls} stages priced, {known}")

    return search(
        model,
        mesh,
        counts,
        model.options,
        memory,
        schedules=SCHEDULES,
        **(THOROUGH if mesh.size < MANY else QUICK),
        scaling=True,
        progress=told,
        workers=workers,
    )


def _sizes(batch: int) -> list[int]:
    """Powers of two that divide a batch, samples of a microbatch."""
    sizes = [1]
    while batch % (2 * sizes[-1]) == 0 and 2 * sizes[-1] <= batch:
        sizes.append(2 * sizes[-1])
    return sizes


class OnMicrobatches:
    """Number of microbatches of a batch -> the model on one of them; of a deep one a few blocks.

    Of a model that is data two sizes of a microbatch are traced, from which the others follow.

    Args:
        wanted: the model.
        batch: samples of a step.
        mesh: the devices.
        options: of planning.
    """

    def __init__(self, wanted: Wanted, batch: int, mesh: Mesh, options: Options) -> None:
        layers = depth(wanted.source, wanted.layers) if is_data(wanted.source) else None
        self.more = max(0, (layers or 0) - LEAST)
        self.wanted = replace(wanted, layers=LEAST) if self.more else wanted
        self.batch, self.mesh, self.options = batch, mesh, options
        self.traced: dict[int, Graph] = {}

    def __call__(self, microbatches: int) -> Layered:
        """The layers, on one microbatch."""
        samples = self.batch // microbatches
        prepared = self._graph(samples)
        graph = remove_shares(prepared)
        seconds, _ = weights(graph, prepared, self.mesh, self.options)
        return Layered(graph, find_layers(prepared, seconds), self.more, samples)

    def whole(self, microbatches: int) -> Graph:
        """All layers on one microbatch, normalised, without shares and repeats."""
        samples = self.batch // microbatches
        graph = self._graph(samples)
        if self.more:
            fewer = replace(self.wanted, layers=LEAST - 1, batch=samples)
            try:
                graph = deepen(capture_model(fewer, self.options, Trace(None)), graph, self.more)
            except GraphError:  # its blocks differ
                all_layers = replace(fewer, layers=LEAST + self.more)
                graph = capture_model(all_layers, self.options, Trace(None))
        return remove_shares(graph)

    def _graph(self, samples: int) -> Graph:
        if samples > max(_TRACED) and is_data(self.wanted.source):
            try:
                few, many = (self._trace(size) for size in _TRACED)
                return rebatch(few, many, _TRACED, samples)
            except GraphError:
                pass  # something else depends on the batch
        return self._trace(samples)

    def _trace(self, samples: int) -> Graph:
        if samples not in self.traced:
            one = replace(self.wanted, batch=samples)
            self.traced[samples] = capture_model(one, self.options, Trace(None))
        return self.traced[samples]


def render(found: Searched, made: PipelinePlan) -> list[RenderableType]:
    """The stages, and the runners-up; of these and of the best the search's own figures."""
    best = found.pipeline
    stages = Table(box=None, header_style="bold", title_justify="left")
    for name in ("stage", "devices", "layers", "mesh", "a microbatch", "memory"):
        stages.add_column(name)
    for number, one in enumerate(best.stages):
        stages.add_row(
            str(number),
            str(one.submesh),
            ", ".join(f"{c.first}-{c.last}" for c in one.chunks),
            _mesh(one),
            format_seconds(one.seconds),
            format_bytes(one.memory),
        )
    head = (
        f"{best.schedule}, {best.microbatches} microbatches, {len(best.stages)} stages: "
        f"{format_seconds(made.predicted['step_seconds'])} a step (simulated), "
        f"{made.predicted['bubble']:.1%} bubble, {format_bytes(made.predicted['peak_bytes'])}"
    )
    others = Table(box=None, header_style="bold")
    for name in ("runner-up", "microbatches", "stages", "a step", "slower by"):
        others.add_column(name)
    for other, seconds in found.others[:5]:
        others.add_row(*_row(other), format_seconds(seconds), f"{seconds / found.seconds - 1:.1%}")
    proved = 0 < found.found.gap < 1
    gap = f"within {found.found.gap:.1%} of the best by the formulas" if proved else ""
    tail = f"{found.found.calls} stages priced{', ' if gap else ''}{gap}"
    return [head, "", stages, "", others, tail]


def _mesh(one: Stage) -> str:
    """A stage's devices as its plan sees them, and whether its blocks compute anything again."""
    again = {chunk.candidate.recompute for chunk in one.chunks} - {"none"}
    recompute = f", recompute {' and '.join(sorted(again))}" if again else ""
    return one.chunks[0].candidate.label + recompute


def _row(one: Pipeline) -> tuple[str, str, str]:
    return one.schedule, str(one.microbatches), str(len(one.stages))


def to_json(found: Searched, made: PipelinePlan) -> dict[str, object]:
    """What `render` shows, for scripts."""
    best = found.pipeline
    return {
        "graph": made.graph,
        "mesh": str(made.mesh),
        "model": made.model,
        "schedule": best.schedule,
        "microbatches": best.microbatches,
        "predicted": made.predicted,
        "searched_seconds": found.seconds,
        "stages": [
            {
                "devices": str(one.submesh),
                "layers": [[chunk.first, chunk.last] for chunk in one.chunks],
                "mesh": one.chunks[0].candidate.label,
                "recompute": [chunk.candidate.recompute for chunk in one.chunks],
                "microbatch_seconds": one.seconds,
                "once_seconds": one.once,
                "peak_bytes": one.memory,
            }
            for one in best.stages
        ],
        "others": [
            {
                "schedule": one.schedule,
                "microbatches": one.microbatches,
                "stages": len(one.stages),
                "step_seconds": seconds,
            }
            for one, seconds in found.others
        ],
        "priced": found.found.calls,
        "gap": found.found.gap if found.found.bound else None,
    }

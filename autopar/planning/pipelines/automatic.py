"""The fastest pipeline: stages, sub-meshes, microbatches and schedule, chosen together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from autopar.errors import GraphError, InfeasibleError
from autopar.inter_op.layers import find_layers
from autopar.inter_op.schedules import candidates
from autopar.inter_op.stage_values import Progress
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_seconds
from autopar.ir.update import State
from autopar.passes.deepen import LEAST, deepen
from autopar.passes.rebatch import rebatch
from autopar.passes.shares import remove_shares
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.pipelines.layered import Layered
from autopar.planning.pipelines.schedule_names import further_copies, schedule_of, with_state
from autopar.planning.pipelines.search import Searched, plan_of, search
from autopar.planning.pipelines.stages import weights
from autopar.planning.prices import limit_of
from autopar.planning.trace import Trace
from autopar.planning.workers import Workers


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


@dataclass(frozen=True)
class AnySize:
    """A model on a batch of any size, with any number of layers.

    Attributes:
        graph: samples, and layers in place of the model's own or None -> the prepared graph.
        layers: how many the model has, where `graph` takes other numbers of them; None where not.
        scales: whether larger batches follow from two small ones, with no further trace.
    """

    graph: Callable[[int, int | None], Graph]
    layers: int | None = None
    scales: bool = False


class OnMicrobatches:
    """Number of microbatches of a batch -> the model on one of them; of a deep one a few blocks.

    Args:
        model: on a batch of any size.
        batch: samples of a step.
        mesh: the devices.
        options: of planning.
    """

    def __init__(self, model: AnySize, batch: int, mesh: Mesh, options: Options) -> None:
        self.more = max(0, (model.layers or 0) - LEAST)
        self.model, self.layers = model, LEAST if self.more else None
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
            try:
                graph = deepen(self.model.graph(samples, LEAST - 1), graph, self.more)
            except GraphError:  # its blocks differ
                graph = self.model.graph(samples, LEAST + self.more)
        return remove_shares(graph)

    def _graph(self, samples: int) -> Graph:
        if samples > max(_TRACED) and self.model.scales:
            try:
                few, many = (self._trace(size) for size in _TRACED)
                return rebatch(few, many, _TRACED, samples)
            except GraphError:
                pass  # something else depends on the batch
        return self._trace(samples)

    def _trace(self, samples: int) -> Graph:
        if samples not in self.traced:
            self.traced[samples] = self.model.graph(samples, self.layers)
        return self.traced[samples]


def plan_pipeline(
    model: AnySize,
    batch: int,
    mesh: Mesh,
    options: Options,
    trace: Trace,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Searched, Plan]:
    """The fastest pipeline for a global batch, with what else was looked at.

    Args:
        model: on a batch of any size.
        batch: samples of a step.
        mesh: the devices.
        options: of planning.
        trace: keeps what is planned.
        progress: is told what is done.

    Raises:
        InfeasibleError: no pipeline fits into memory.
    """
    with Workers(None if mesh.size >= MANY else 0) as workers:
        sized = OnMicrobatches(model, batch, mesh, options)
        found = find_pipeline(sized, limit_of(mesh, options), progress, workers)
        progress("planning the stages")
        graph = sized.whole(found.pipeline.microbatches)
        return found, plan_of(found, graph, mesh, options, trace, workers=workers)


def find_pipeline(
    model: OnMicrobatches,
    memory: float,
    progress: Callable[[str], None],
    workers: Workers | None = None,
) -> Searched:
    """What the search finds within so many bytes a device; raises as `plan_pipeline`."""
    batch, mesh = model.batch, model.mesh
    counts = [batch // size for size in _sizes(batch) if batch // size >= FEWEST] or [batch]

    def told(step: Progress) -> None:
        known = f"best {format_seconds(step.seconds)}" if step.seconds < 1e300 else "none"
        progress(f"{step.doing}: {step.calls} stages priced, {known}")

    def found(options: Options, schedules: Sequence[str]) -> Searched:
        return search(
            model,
            mesh,
            counts,
            options,
            memory,
            schedules=schedules,
            **(THOROUGH if mesh.size < MANY else QUICK),
            scaling=True,
            progress=told,
            workers=workers,
        )

    exact, options = candidates(), model.options
    best = found(options, exact)
    for name in [one for one in candidates(options.allow) if one not in exact]:
        # It keeps another copy of its weights, which is priced as one of what the optimizer has.
        made = schedule_of(name, 2, 8)
        update, copies = options.update, max(further_copies(made, n) for n in range(made.stages))
        for number in range(copies):
            update = update.with_state(State(f"older_weights_{number + 1}"))
        try:
            other = found(replace(with_state(options, made), update=update), (name,))
        except InfeasibleError:
            continue
        best = min(best, other, key=lambda one: one.seconds)
    return best


def _sizes(batch: int) -> list[int]:
    """Powers of two that divide a batch, samples of a microbatch."""
    sizes = [1]
    while batch % (2 * sizes[-1]) == 0 and 2 * sizes[-1] <= batch:
        sizes.append(2 * sizes[-1])
    return sizes

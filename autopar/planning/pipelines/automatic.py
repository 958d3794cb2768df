"""Finds the fastest pipeline for a global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict

from autopar.errors import GraphError, InfeasibleError
from autopar.inter_op.layers import Layers, find_layers, layers_at
from autopar.inter_op.schedules import candidates, computes_as_one
from autopar.inter_op.stage_values import Progress
from autopar.intra_op.pins.dims import without_samples
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_seconds
from autopar.passes.deepen import LEAST, deepen
from autopar.passes.loss.whole_counts import count_whole_batch
from autopar.passes.observations import observations
from autopar.passes.rebatch import rebatch
from autopar.passes.shares import remove_shares
from autopar.passes.verify import verify
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.pipelines.layered import Layered, runs
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.planning.pipelines.search import INEXACT, SearchResult, fastest, plan_of, search
from autopar.planning.pipelines.stages import weights
from autopar.planning.pipelines.streaming import (
    FLUSHED,
    Streamed,
    obstacle,
    options_for,
    trains_shared,
)
from autopar.planning.prices import check_prices, limits_of
from autopar.planning.trace import Trace
from autopar.planning.workers import Workers


class Effort(TypedDict):
    """Arguments of `search`."""

    most_calls: int
    patience: int
    gap: float
    shapes: int
    near: float


# Number of devices from which a search takes longer than starting processes.
MANY = 64
# Effort of a search; see `search`. On many devices, bounds are too loose to prove anything, so the
# search does not try, nor does it price pipelines that only the simulation could find to be faster.
THOROUGH: Effort = {"most_calls": 80, "patience": 24, "gap": 0.003, "shapes": 3, "near": INEXACT}
QUICK: Effort = {"most_calls": 80, "patience": 0, "gap": 0.003, "shapes": 1, "near": 0.0}
_TRACED = (2, 4)  # batch sizes from which larger ones are extrapolated


@dataclass(frozen=True)
class AnySize:
    """A model that can be captured on a batch of any size, with any number of layers.

    Attributes:
        graph: (samples, number of layers or None for the model's own) -> the prepared graph.
        layers: the model's number of layers; None if `graph` cannot take another.
        scales: whether the graph of a larger batch follows from those of two small ones.
    """

    graph: Callable[[int, int | None], Graph]
    layers: int | None = None
    scales: bool = False


class OnMicrobatches:
    """Maps a number of microbatches to the model on one of them; of a deep model, to a few blocks.

    Args:
        model: captures the model on a batch of any size.
        batch: samples in a step.
        mesh: the devices.
        options: options of planning.
    """

    def __init__(self, model: AnySize, batch: int, mesh: Mesh, options: Options) -> None:
        self.more = max(0, (model.layers or 0) - LEAST)
        self.model, self.layers = model, LEAST if self.more else None
        self.batch, self.mesh, self.options = batch, mesh, options
        self.traced: dict[int, Graph] = {}
        self.deep: dict[int, Graph] = {}
        self.whole_graphs: dict[int, Graph] = {}
        self.layered: dict[int, Layered] = {}
        self.ends: tuple[str, ...] = ()  # of the layers

    def __call__(self, microbatches: int) -> Layered:
        """Returns the layers of the model on one microbatch, the same for every number of them."""
        samples = self.batch // microbatches
        if samples in self.layered:  # searches of several schedules ask for the same
            return self.layered[samples]
        prepared = self._graph(samples)
        graph = remove_shares(prepared)
        seconds, _ = weights(graph, prepared, self.mesh, self.options)
        layers = self._layers(prepared, seconds)
        if self.more and not any(count > 1 for _, count in runs(layers.kinds)):
            # No block stands for others, so that all of them must be captured.
            self.more, self.layers, self.ends = 0, None, ()
            self.traced.clear()
            self.layered.clear()
            return self(microbatches)
        observed = observations(prepared)
        self.layered[samples] = Layered(graph, layers, self.more, samples, observed)
        return self.layered[samples]

    def _layers(self, graph: Graph, seconds: Mapping[str, float]) -> Layers:
        """Returns the layers of a graph: those of the first one, whose weights differ.

        Raises:
            GraphError: the graph of this batch size has other operators, and other layers.
        """
        if not self.ends:
            layers = find_layers(graph, seconds, by_blocks=self.more > 0)
            self.ends = tuple(layers.ends)
            return layers
        try:
            return layers_at(graph, seconds, self.ends)
        except GraphError:
            layers = find_layers(graph, seconds, by_blocks=self.more > 0)
            if len(layers) != len(self.ends):
                raise
            return layers

    def whole(self, microbatches: int, schedule: str) -> Graph:
        """Returns all layers on one microbatch, normalised, without shares and repeats.

        Raises:
            OptionError: the losses of microbatches do not add up to that of the batch.
        """
        samples = self.batch // microbatches
        graph = self._all_layers(samples)
        if self.options.whole_loss and computes_as_one(schedule):

            def scaled(factor: int) -> Graph:
                return self._all_layers(factor * samples)

            without = partial(without_samples, self.options.table)
            graph = verify(count_whole_batch(graph, microbatches, scaled, without))
        return graph

    def ends_of_all(self, microbatches: int) -> tuple[str, ...]:
        """Returns the last operator of every layer of the whole model."""
        samples = self.batch // microbatches
        graph, prepared = self._all_layers(samples), self._deepened(samples)
        seconds, _ = weights(graph, prepared, self.mesh, self.options)
        return find_layers(prepared, seconds, by_blocks=True).ends

    def _all_layers(self, samples: int) -> Graph:
        if samples not in self.whole_graphs:
            self.whole_graphs[samples] = remove_shares(self._deepened(samples))
        return self.whole_graphs[samples]

    def _deepened(self, samples: int) -> Graph:
        """Returns the prepared graph of all layers."""
        if samples not in self.deep:
            graph = self._graph(samples)
            if self.more:
                try:
                    graph = deepen(self.model.graph(samples, LEAST - 1), graph, self.more)
                except GraphError:  # the blocks differ
                    graph = self.model.graph(samples, LEAST + self.more)
            self.deep[samples] = graph
        return self.deep[samples]

    def _graph(self, samples: int) -> Graph:
        if samples > max(_TRACED) and self.model.scales:
            try:
                few, many = (self._trace(size) for size in _TRACED)
                return rebatch(few, many, _TRACED, samples)
            except GraphError:
                pass  # the graph depends on the batch in another way
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
) -> tuple[SearchResult, Plan]:
    """Returns the fastest pipeline for a global batch.

    Args:
        model: captures the model on a batch of any size.
        batch: samples in a step.
        mesh: the devices.
        options: options of planning.
        trace: writes intermediate values.
        progress: reports the progress of the search.

    Returns:
        The result of the search, with its runners-up, and the plan of the fastest pipeline.

    Raises:
        InfeasibleError: no pipeline fits into memory.
        CalibrationError, PrecisionError, UnknownDeviceError, CostError: see `cost_model`.
    """
    check_prices(mesh, options, staged=True)
    with Workers(None if mesh.size >= MANY else 0) as workers:
        sized = OnMicrobatches(model, batch, mesh, options)
        searched = find_pipeline(sized, limits_of(mesh, options), progress, workers)
        progress("planning the stages")
        count = searched.pipeline.microbatches
        if not searched.ends:
            searched = replace(searched, ends=sized.ends_of_all(count))
        graph = sized.whole(count, searched.pipeline.schedule)
        observed = sized(count).observed
        return searched, plan_of(searched, graph, mesh, options, trace, workers, observed)


def find_pipeline(
    model: OnMicrobatches,
    memory: float | Mapping[str, float],
    progress: Callable[[str], None],
    workers: Workers | None = None,
) -> SearchResult:
    """Searches for the fastest pipeline within `memory` bytes of a device, see `search`.

    Raises the errors of `plan_pipeline`.
    """
    batch, mesh = model.batch, model.mesh
    counts = numbers_of_microbatches(batch)

    def report(step: Progress) -> None:
        known = f"best {format_seconds(step.seconds)}" if step.seconds < 1e300 else "none"
        progress(f"{step.doing}: {step.calls} stages priced, {known}")

    def searched(
        options: Options, schedules: Sequence[str], streamed: Streamed = FLUSHED
    ) -> SearchResult:
        return search(
            model,
            mesh,
            counts,
            options,
            memory,
            schedules=schedules,
            **(THOROUGH if mesh.size < MANY else QUICK),
            scaling=True,
            progress=report,
            workers=workers,
            streamed=streamed,
        )

    exact, options = candidates(), model.options
    found = [searched(options, exact)]
    names = [one for one in candidates(options.allow) if one not in exact]
    tied = bool(names) and model(counts[0]).ties
    for name in names:
        rows = schedule_of(name, 2, 8)
        own = options_for(options, rows)
        reason = obstacle(rows, own, mesh)
        if not reason and tied and not trains_shared(name):
            reason = "stages would run on weights that other holders of a parameter lack"
        if reason:
            progress(f"{name} is left out: {reason}")
            continue
        with suppress(InfeasibleError):
            found.append(searched(own, (name,), Streamed(name, tied)))
    return fastest(found)


def numbers_of_microbatches(batch: int) -> list[int]:
    """Returns the numbers of microbatches to choose from, the largest first.

    They are those whose size is a power of two. If a batch has an odd factor, these are at least as
    many as that factor, so all smaller numbers that divide the batch are added.
    """
    power = batch & -batch
    odd = batch // power
    small = [count for count in range(1, math.isqrt(batch) + 1) if batch % count == 0]
    fewer = {count for count in (*small, *(batch // one for one in small)) if count < odd}
    return sorted({*fewer, *(odd << k for k in range(power.bit_length()))}, reverse=True)

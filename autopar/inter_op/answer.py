"""Builds the result of a stage search: pipelines with their figures, or an infeasibility error."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.errors import InfeasibleError
from autopar.inter_op import dynamic_program as kernels
from autopar.inter_op.equal_submeshes import EqualSubmeshPipelines
from autopar.inter_op.search_task import Draft, Space
from autopar.inter_op.single_chunk import SingleChunkPipelines
from autopar.inter_op.stage_prices import Floats, Prices
from autopar.inter_op.stage_values import Candidate, Chunk, Pipeline, Stage


def pipeline_of(draft: Draft, prices: Prices, transfers: Mapping[int, Floats]) -> Pipeline:
    """Returns the pipeline of a draft whose prices are all known."""
    count, law = draft.microbatches, draft.law
    stages = []
    for rank, (q, numbers) in enumerate(draft.stages):
        chunks = tuple(
            Chunk(first, last, prices.known[count, row, q][k]) for row, first, last, k in numbers
        )
        in_flight = law.in_flight(len(draft.stages) - rank, len(draft.stages), count)
        ways = [chunk.candidate for chunk in chunks]
        stages.append(
            Stage(
                prices.submeshes[q],
                chunks,
                sum(way.seconds for way in ways) / law.copies,
                sum(way.once for way in ways),
                _memory(ways, in_flight),
                in_flight,
            )
        )
    where = {first: q for q, numbers in draft.stages for _, first, _, _ in numbers}
    order = sorted(where)
    way = sum(float(transfers[count][b, where[a], where[b]]) for a, b in itertools.pairwise(order))
    return Pipeline(
        law.name,
        count,
        tuple(stages),
        draft.seconds,
        way,
        max(count * stage.seconds + stage.once for stage in stages),
    )


def infeasible(
    space: Space, configs: Sequence[SingleChunkPipelines | EqualSubmeshPipelines]
) -> InfeasibleError:
    """Returns an error that names the known pipeline of equal sub-meshes with the least memory."""
    least, word = _frugal(space, configs, "none"), "needs"
    if least is None:  # the bounds rule out every pipeline, so nothing was priced
        least, word = _frugal(space, configs, "bound"), "needs at least"
    if len(space.orders) > 1:
        return InfeasibleError(
            "no pipeline fits into the memory of the devices",
            why="the cluster has several kinds of devices, and each kind must hold stages",
            todo="use more devices or smaller microbatches, or leave the smallest devices out",
        )
    if least is None:
        return InfeasibleError(
            "there is no pipeline of these layers on this cluster",
            why="no number of stages, sub-meshes and microbatches fits any schedule",
            todo="allow more microbatches, other schedules or other numbers of devices",
        )
    peak, words = least
    gib, memory = 2.0**30, float(space.memory[0])
    return InfeasibleError(
        f"no pipeline fits into {memory / gib:.2f} GiB a device",
        why=f"the smallest one found, {words}, {word} {peak / gib:.2f} GiB, "
        f"{(peak - memory) / gib:.2f} GiB too much",
        todo="use more devices or smaller microbatches, or allow recomputation, state sharding",
    )


def _frugal(
    space: Space, configs: Sequence[SingleChunkPipelines | EqualSubmeshPipelines], unknown: str
) -> tuple[float, str] | None:
    """Returns the most frugal known pipeline of equal sub-meshes and its bytes per device."""
    least: tuple[float, str] | None = None
    for config in configs:
        law, count = config.law, config.microbatches
        table = space.prices.table(count, unknown)
        for q, part in enumerate(space.prices.submeshes):
            stages = space.devices // part.size
            legal = stages * part.size == space.devices <= part.size * len(space.prices.kinds)
            if law.chunks > 1 or not legal or not law.fits(stages, count):
                continue
            peaks = np.full((len(space.prices.ranges), stages), np.inf)
            for s in range(1, stages + 1):
                kept = law.in_flight(s, stages, count)
                figures = table.figures[:, q]
                bytes_ = figures[..., 2] + kept * figures[..., 3] + figures[..., 4]
                there = np.arange(bytes_.shape[1]) < table.count[:, q, None]
                peaks[:, s - 1] = np.where(there, bytes_, np.inf).min(axis=1)
            peak = float(kernels.least_memory(space.prices.row, peaks)[0])
            many = "stage" if stages == 1 else "stages"
            words = f"{law.name} with {stages} {many} on {part} and {count} microbatches"
            if peak < np.inf and (least is None or peak < least[0]):
                least = peak, words
    return least


def _memory(ways: Sequence[Candidate], in_flight: float) -> float:
    transient = max(way.transient for way in ways)
    return sum(way.kept(in_flight) for way in ways) + transient

"""Compares our pipelines with every plan of a Megatron-style grid: `python benchmarks/grid.py`.

The grid has tensor parallelism with sequence parallelism on the devices of one host, pipeline
parallelism of equal numbers of blocks, data parallelism over the rest, optimizer state split over
the replicas (ZeRO-1), all microbatch sizes, and 1F1B with all numbers of chunks on a rank. If
memory requires it, all blocks recompute their activations. As in Megatron, the embedding and the
head may count as a block each. The grid leaves out only plans that do not fit into memory; a plan
whose slowest rank alone is busy for longer than the tenth best plan takes is not simulated. One
cost model prices all plans, and one simulator times them action by action. All figures are
simulated.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import pins
from autopar.cli.common.model_options import model_of_any_size
from autopar.cost.device import device
from autopar.inter_op.laws import law
from autopar.inter_op.stage_values import Candidate, Chunk, Law, Pipeline, Stage
from autopar.inter_op.submeshes import SubMesh, submeshes
from autopar.ir.mesh import Mesh
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.pipelines.automatic import AnySize, OnMicrobatches, find_pipeline
from autopar.planning.pipelines.borders import Borders
from autopar.planning.pipelines.search import SearchResult, simulate_pipeline
from autopar.planning.pipelines.stage_costs import StageCosts
from autopar.planning.workers import Workers
from autopar.zoo.loading import depth
from benchmarks.harness import write

KEPT = 10  # plans of the grid that are written


@dataclass(frozen=True)
class Case:
    """A model, a cluster and the samples of a step."""

    model: str
    mesh: str
    batch: int
    seq: int | None = None
    layers: int | None = None


CASES = (
    Case("gpt-3-175b", "A100-80: node=128, gpu=8", 1536),
    Case("llama-3.1-405b", "H100: node=64, gpu=8", 512),
    Case("llama-3.1-405b", "H100: node=512, gpu=8", 2048),
)


@dataclass(frozen=True)
class Point:
    """One plan of the grid: devices along each direction, samples of a replica's microbatch."""

    tensor: int
    pipeline: int
    data: int
    chunks: int
    micro_batch: int
    counted: bool  # whether the embedding and the head count as blocks


@dataclass(frozen=True)
class Played:
    """A plan of the grid that fits into memory, with its simulated time."""

    point: Point
    pipeline: Pipeline
    seconds: float
    bubble: float
    recompute: str


class Grid:
    """All plans of the grid for one case."""

    def __init__(self, case: Case) -> None:
        self.mesh, self.batch = Mesh.parse(case.mesh), case.batch
        self.memory = device(self.mesh).usable
        self.options = Options(memory=self.memory, recompute="none")
        self.wanted = ModelSpec(case.model, None, case.seq, case.layers)
        self.blocks = depth(case.model, case.layers) or 0
        self.parts = {part.size: part for part in submeshes(self.mesh)}
        self.layered = cache(
            OnMicrobatches(self.model(self.options), case.batch, self.mesh, self.options)
        )
        self.costs = cache(self._costs)
        self.borders = Borders(self.layered(case.batch), self.mesh, self.options)
        self.tried = self.fitting = 0
        self.found: list[Played] = []  # the best, the fastest first

    def model(self, options: Options) -> AnySize:
        """Returns the case's model, on batches of any size."""
        return model_of_any_size(self.wanted, options)

    def _costs(self, tensor: int, data: int, recompute: str) -> tuple[StageCosts, SubMesh] | None:
        """Prices under the grid's pins on (data, tensor) devices; None where none are so shaped."""
        part = self.parts.get(tensor * data)
        wanted = tuple(size for size in (data, tensor) if size > 1) or (1,)
        meshes = [m for m in (part.meshes if part else ()) if m.shape == wanted]
        if part is None or not meshes:
            return None
        names = meshes[0].names
        words: list[Any] = []
        if data > 1:
            words.append(pins.data_parallel(names[0]))
        if tensor > 1:
            words.append(pins.megatron_sp(names[-1]))
        options = replace(self.options, pins=words or None, state="zero1", recompute=recompute)
        prices = StageCosts(self.layered, self.mesh, options, math.inf, 1)
        return prices, replace(part, meshes=(meshes[0],))

    def spans(self, chunks: int, counted: bool) -> list[tuple[int, int]] | None:
        """The layers, first and last, of each chunk; None where blocks do not divide."""
        kinds, weights = self.layered(self.batch).kinds, self._weights()
        block = sorted(weights)[len(weights) // 2]
        before = 0 if weights[0] >= 0.9 * block else 1
        behind = len(kinds) - self.blocks - before
        whole = self.blocks + 2 * counted
        if whole % chunks or (counted and chunks < 2):
            return None
        sizes = [whole // chunks] * chunks
        sizes[0] -= counted
        sizes[-1] -= counted
        if min(sizes) < 1:
            return None
        sizes[0] += before
        sizes[-1] += behind
        ends = [sum(sizes[: at + 1]) for at in range(chunks)]
        return [(end - size, end - 1) for end, size in zip(ends, sizes, strict=True)]

    def _weights(self) -> list[float]:
        """Seconds on one device of each layer of the whole model."""
        short = self.layered(self.batch)
        have, more = short.layers, short.more
        largest = max(set(have.kinds), key=have.kinds.count)
        last = max(at for at, kind in enumerate(have.kinds) if kind == largest)
        return [
            *have.weights[:last],
            *([have.weights[last]] * (1 + more)),
            *have.weights[last + 1 :],
        ]

    def points(self) -> Iterator[tuple[Point, ...]]:
        """Plans that differ in the size of a microbatch only, the smallest first."""
        devices = self.mesh.size
        most = self.mesh.axes[-1].size
        for tensor in (t for t in range(1, most + 1) if most % t == 0):
            for pipeline in range(1, min(self.blocks, devices // tensor) + 1):
                if devices % (tensor * pipeline):
                    continue
                data = devices // (tensor * pipeline)
                for chunks in range(1, self.blocks // pipeline + 1 if pipeline > 1 else 2):
                    for counted in (False, True):
                        sizes = (2**k for k in range(self.batch.bit_length()))
                        yield tuple(
                            Point(tensor, pipeline, data, chunks, size, counted)
                            for size in sizes
                            if self.batch % (data * size) == 0
                        )

    def played(self) -> list[Played]:
        """The best plans that fit into memory, the fastest first."""
        for row in self.points():
            for point in row:
                self.tried += 1
                if not (self._play(point, "none") or self._play(point, "full")):
                    break  # nor does a larger microbatch fit
        return self.found

    def _play(self, point: Point, recompute: str) -> bool:
        """Take note of a plan if it is among the best; False where it does not fit."""
        name = "1f1b" if point.chunks == 1 else f"interleaved_1f1b chunks={point.chunks}"
        count = self.batch // (point.data * point.micro_batch)
        spans = self.spans(point.pipeline * point.chunks, point.counted)
        priced = self.costs(point.tensor, point.data, recompute)
        if spans is None or priced is None or self._weigh(point) > self.memory:
            return False
        rule = _law(point.chunks)
        if not rule.fits(point.pipeline, count):
            return True
        costs, part = priced
        ways = {span: next(iter(costs(*span, part, count)), None) for span in spans}
        stages = []
        for rank in range(point.pipeline):
            held = [spans[at] for at in range(rank, len(spans), point.pipeline)]
            stages.append(
                _stage(part, [(span, ways[span]) for span in held], rule, rank, point, count)
            )
        if not all(ways.values()) or max(stage.memory for stage in stages) > self.memory:
            return False
        self.fitting += 1
        busy = max(count * stage.seconds for stage in stages)
        once = max(stage.once for stage in stages)
        if len(self.found) == KEPT and busy + once >= self.found[-1].seconds:
            return True
        pipeline = Pipeline(name, count, tuple(stages), math.inf, 0.0, busy)
        seconds, timeline = simulate_pipeline(pipeline, self.borders.between(self.batch))
        one = Played(point, pipeline, seconds, timeline.bubble, recompute)
        self.found = sorted([*self.found, one], key=lambda one: one.seconds)[:KEPT]
        return True

    def _weigh(self, point: Point) -> float:
        """At least so many bytes are parameters, gradients and optimizer state."""
        kinds = self.layered(self.batch).kinds
        (costs, _), ways = self.costs(1, 1, "none") or (None, None), point.tensor * point.pipeline
        assert costs is not None
        fixed = sum(costs.alone(kind, self.batch)[1] for kind in kinds)
        return fixed * (0.5 + 0.5 / point.data) / ways


@cache
def _law(chunks: int) -> Law:
    return law("1f1b") if chunks == 1 else law("interleaved_1f1b", chunks=chunks)


def _stage(
    part: SubMesh,
    held: list[tuple[tuple[int, int], Candidate | None]],
    rule: Law,
    rank: int,
    point: Point,
    count: int,
) -> Stage:
    chunks = tuple(Chunk(*span, way) for span, way in held if way is not None)
    ways = [chunk.candidate for chunk in chunks]
    kept = rule.in_flight(point.pipeline - rank, point.pipeline, count)
    return Stage(
        part,
        chunks,
        sum(way.seconds for way in ways),
        sum(way.once for way in ways),
        sum(way.kept(kept) for way in ways) + max(way.transient for way in ways),
    )


def _processor() -> float:
    """Returns the processor seconds of this process and of its ended child processes."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def rows(case: Case) -> list[dict[str, Any]]:
    """Our plan and the best of the grid."""
    grid = Grid(case)
    began, busy = time.perf_counter(), _processor()
    options = replace(grid.options, recompute="auto")
    model = OnMicrobatches(grid.model(options), case.batch, grid.mesh, options)
    with Workers() as workers:
        ours: SearchResult = find_pipeline(model, grid.memory, lambda text: None, workers)
    seconds, busy = time.perf_counter() - began, _processor() - busy
    best = ours.pipeline
    ways = [chunk.candidate for stage in best.stages for chunk in stage.chunks]
    same = {"model": case.model, "mesh": case.mesh, "batch": case.batch}
    found = [
        {
            **same,
            "plan": "ours",
            "schedule": best.schedule,
            "stages": len(best.stages),
            "microbatches": best.microbatches,
            "devices": " ".join(sorted({str(stage.submesh) for stage in best.stages})),
            "recompute": "full" if any(way.recompute != "none" for way in ways) else "none",
            "step_seconds": round(ours.seconds, 5),
            "bubble": round(ours.timeline.bubble, 4),
            "peak_gib": round(max(stage.memory for stage in best.stages) / 2**30, 2),
            "search_seconds": round(seconds, 1),
            "processor_seconds": round(busy, 1),
        }
    ]
    played = grid.played()
    for place, one in enumerate(played[:KEPT]):
        point = one.point
        found.append(
            {
                **same,
                "plan": f"grid {place + 1}",
                "schedule": one.pipeline.schedule,
                "stages": point.pipeline,
                "microbatches": one.pipeline.microbatches,
                "devices": f"tp={point.tensor} dp={point.data} micro_batch={point.micro_batch}",
                "recompute": one.recompute,
                "step_seconds": round(one.seconds, 5),
                "bubble": round(one.bubble, 4),
                "peak_gib": round(max(s.memory for s in one.pipeline.stages) / 2**30, 2),
                "tried": grid.tried,
                "fitting": grid.fitting,
                "ours_to_grid": round(ours.seconds / one.seconds, 4),
            }
        )
    return found


def main() -> None:
    """Write results/grid.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", type=int, action="append", help="a number of a case, from 0")
    for number in parser.parse_args().case or range(len(CASES)):
        found = rows(CASES[number])
        for row in found:
            print(row)
        write("grid", found, keys=["model", "mesh", "batch", "plan"])


if __name__ == "__main__":
    main()

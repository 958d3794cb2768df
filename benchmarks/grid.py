"""Our pipelines beside every plan of a Megatron-style grid: `python benchmarks/grid.py`.

The grid: tensor parallelism with sequence parallelism on the devices of one host, pipeline
parallelism of equal numbers of blocks, data parallelism over the rest, optimizer state split over
the replicas (ZeRO-1), all sizes of a microbatch, 1F1B with all numbers of chunks on a rank, exactly
as many as can be had. As in Megatron, the embedding and the head may count as a block each. Nothing
is left out but what does not fit into memory. All plans are priced by one cost model, and every
action of every plan is played by one simulator. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import pins
from autopar.cli.model import Wanted
from autopar.cli.pipeline import find_pipeline, layered_on
from autopar.cost.device import device
from autopar.cost.work import optimizer_work
from autopar.inter_op.laws import law
from autopar.inter_op.stage import Candidate, Chunk, Law, Pipeline, Stage
from autopar.inter_op.submeshes import SubMesh, submeshes
from autopar.ir.mesh import Mesh
from autopar.planning.search import Borders, Searched, play
from autopar.planning.single import Options, cost_model
from autopar.planning.stage_costs import Layered, StageCosts
from autopar.zoo.load import depth
from benchmarks.harness import write

STATE_BYTES = 2.0  # of AdamW, in units of a parameter's own
KEPT = 10  # plans of the grid that are written


@dataclass(frozen=True)
class Case:
    """A model, a cluster and the samples of a step."""

    model: str
    mesh: str
    batch: int


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
    """A plan of the grid that fits into memory, with what it takes by simulation."""

    point: Point
    pipeline: Pipeline
    seconds: float
    bubble: float


class Grid:
    """All plans of the grid for one case."""

    def __init__(self, case: Case) -> None:
        self.mesh, self.batch = Mesh.parse(case.mesh), case.batch
        self.options, self.memory = Options(), device(self.mesh).memory
        self.wanted = Wanted(case.model, None, None, None)
        self.blocks = depth(case.model) or 0
        self.parts = {part.size: part for part in submeshes(self.mesh)}
        self.layered = cache(self._layered)
        self.costs = cache(self._costs)
        self.borders = Borders(self.layered(case.batch), self.mesh, self.options)
        self.tried = 0

    def _layered(self, count: int) -> Layered:
        return layered_on(self.wanted, self.batch, self.mesh, self.options, count)

    def _costs(self, tensor: int, data: int) -> tuple[StageCosts, SubMesh] | None:
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
        options = replace(self.options, pins=words or None)
        prices = StageCosts(self.layered, self.mesh, options, math.inf, STATE_BYTES, most=1)
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
        """All plans that fit into memory, the fastest first."""
        found = []
        for row in self.points():
            for point in row:
                self.tried += 1
                one = self._played(point)
                if one is None:
                    break  # nor does a larger microbatch fit
                if one.seconds < math.inf:
                    found.append(one)
        return sorted(found, key=lambda one: one.seconds)

    def _played(self, point: Point) -> Played | None:
        """A plan in time; endless where the schedule does not exist, None where memory ends."""
        name = "1f1b" if point.chunks == 1 else f"interleaved_1f1b chunks={point.chunks}"
        rule = law("1f1b") if point.chunks == 1 else law("interleaved_1f1b", chunks=point.chunks)
        count = self.batch // (point.data * point.micro_batch)
        spans = self.spans(point.pipeline * point.chunks, point.counted)
        priced = self.costs(point.tensor, point.data)
        if spans is None or priced is None or self._weigh(point) > self.memory:
            return None
        missing = Pipeline(name, count, (), math.inf, 0.0, 0.0)
        if not rule.fits(point.pipeline, count):
            return Played(point, missing, math.inf, 0.0)
        costs, part = priced
        ways = {span: self._sharded(costs(*span, part, count), point) for span in spans}
        if not all(ways.values()):
            return None
        stages = []
        for rank in range(point.pipeline):
            held = [spans[at] for at in range(rank, len(spans), point.pipeline)]
            stages.append(
                _stage(part, [(span, ways[span]) for span in held], rule, rank, point, count)
            )
        if max(stage.memory for stage in stages) > self.memory:
            return None
        pipeline = replace(missing, stages=tuple(stages))
        timeline = play(pipeline, self.borders.between(self.batch))
        once = max(stage.once for stage in stages)
        return Played(point, pipeline, timeline.seconds + once, timeline.bubble)

    def _weigh(self, point: Point) -> float:
        """At least so many bytes are parameters, gradients and optimizer state."""
        kinds = self.layered(self.batch).kinds
        (costs, _), ways = self.costs(1, 1) or (None, None), point.tensor * point.pipeline
        assert costs is not None
        fixed = sum(costs.alone(kind, self.batch)[1] for kind in kinds)
        return fixed * (0.5 + 0.5 / point.data) / ways

    def _sharded(self, found: Sequence[Candidate], point: Point) -> Candidate | None:
        """The way that pins leave, its optimizer state split over the replicas.

        A gradient's all_reduce is then a reduce_scatter and the parameter's all_gather, of as many
        bytes.
        """
        if not found:
            return None
        way, data = found[0], point.data
        weights = way.fixed / (2 + STATE_BYTES)
        update = cost_model(self.mesh, self.options).compute(
            optimizer_work(weights, STATE_BYTES, "bf16")
        )
        return replace(
            way,
            fixed=way.fixed - STATE_BYTES * weights * (1 - 1 / data),
            once=max(way.once - update * (1 - 1 / data), 0.0),
        )


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
        sum(way.fixed + kept * way.per_microbatch for way in ways)
        + max(way.transient for way in ways),
    )


def rows(case: Case) -> list[dict[str, Any]]:
    """Our plan and the best of the grid."""
    began = time.perf_counter()
    grid = Grid(case)
    ours: Searched = find_pipeline(
        grid.wanted, grid.mesh, case.batch, grid.options, grid.memory, lambda text: None
    )
    seconds = time.perf_counter() - began
    best = ours.pipeline
    same = {"model": case.model, "mesh": case.mesh, "batch": case.batch}
    found = [
        {
            **same,
            "plan": "ours",
            "schedule": best.schedule,
            "stages": len(best.stages),
            "microbatches": best.microbatches,
            "devices": " ".join(sorted({str(stage.submesh) for stage in best.stages})),
            "step_seconds": round(ours.seconds, 5),
            "bubble": round(ours.timeline.bubble, 4),
            "peak_gib": round(max(stage.memory for stage in best.stages) / 2**30, 2),
            "search_seconds": round(seconds, 1),
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
                "step_seconds": round(one.seconds, 5),
                "bubble": round(one.bubble, 4),
                "peak_gib": round(max(s.memory for s in one.pipeline.stages) / 2**30, 2),
                "tried": grid.tried,
                "fitting": len(played),
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

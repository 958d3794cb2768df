"""Compares our pipelines with those that Alpa published: `python benchmarks/alpa_plans.py`.

The models are GPT and Wide-ResNet on p3.16xlarge hosts (Alpa, OSDI 2022, figure 8; the plans are
those of its artifact's benchmark suites). We take Alpa's stages, sub-meshes, logical shapes and
microbatches, and plan each stage on that shape with our own solver, so Alpa's price is rather too
low. One cost model prices both pipelines, and one simulator times them. Blocks of either recompute
their activations if memory requires it; if Alpa's plan does not fit into 16 GB even so, memory is
unlimited for both. All figures are simulated.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from autopar.errors import InfeasibleError
from autopar.inter_op.laws import law
from autopar.inter_op.layers import find_layers, layers_at
from autopar.inter_op.stage_values import Candidate, Chunk, Pipeline, Stage
from autopar.inter_op.submeshes import SubMesh, submeshes
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import FINDING, NORMALISING, prepare
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.pipelines.automatic import THOROUGH
from autopar.planning.pipelines.borders import Borders
from autopar.planning.pipelines.layered import Layered
from autopar.planning.pipelines.search import search, simulate_pipeline
from autopar.planning.pipelines.stage_costs import StageCosts
from autopar.planning.pipelines.stages import weights
from autopar.planning.trace import Trace
from benchmarks.harness import write
from benchmarks.published.alpa_models import WideResNet, WideSizes
from benchmarks.published.models import GPT, Sizes

MEMORY = 16e9
TRACED = 4  # blocks of a GPT
SAMPLES = tuple(2**k for k in range(8))  # of a microbatch, that are tried
SEQ, VOCAB = 1024, 51200


@dataclass(frozen=True)
class Published:
    """A plan of Alpa's artifact.

    Attributes:
        model: its name there.
        sizes: of the model; layers of a GPT are those of the whole one.
        hosts, devices: of the cluster.
        batch, microbatches: of a step.
        stages: (blocks, hosts, devices, logical shape) of each.
    """

    model: str
    sizes: Sizes | WideSizes
    hosts: int
    devices: int
    batch: int
    microbatches: int
    stages: tuple[tuple[int, int, int, tuple[int, ...]], ...]

    @property
    def mesh(self) -> Mesh:
        """The cluster: 150 GB/s of NVLink a device, 25 Gbit/s of network a host."""
        inner = f"gpu={self.devices} @150GB/s"
        between = f"node={self.hosts} @0.39GB/s, " if self.hosts > 1 else ""
        return Mesh.parse(f"V100: {between}{inner}")


def _gpt(hidden: int, heads: int, layers: int) -> Sizes:
    return Sizes(hidden, heads, layers, VOCAB, SEQ, dropout=0.0)


CASES = (
    Published(
        "GPT-1.3B", _gpt(2048, 32, 24), 1, 4, 1024, 128, ((12, 1, 2, (2,)), (12, 1, 2, (2,)))
    ),
    Published(
        "GPT-6.7B", _gpt(4096, 32, 32), 2, 8, 1024, 64, ((16, 1, 8, (2, 4)), (16, 1, 8, (2, 4)))
    ),
    Published("GPT-39B", _gpt(8192, 64, 48), 8, 8, 1024, 1024, ((3, 1, 4, (4,)),) * 16),
    Published(
        "WResNet-2B", WideSizes(50, 448, 2), 1, 8, 1536, 24, ((8, 1, 4, (4,)), (8, 1, 4, (4,)))
    ),
    Published(
        "WResNet-4B",
        WideSizes(50, 640, 2),
        2,
        8,
        1536,
        32,
        ((5, 1, 4, (4,)), (4, 1, 4, (4,)), (7, 1, 8, (8,))),
    ),
    Published(
        "WResNet-6.8B",
        WideSizes(50, 320, 16),
        4,
        8,
        1536,
        32,
        ((5, 1, 8, (8,)), (4, 1, 8, (8,)), (4, 1, 8, (8,)), (3, 1, 8, (8,))),
    ),
)


def model_on(case: Published) -> Callable[[int], Layered]:
    """Number of microbatches -> the model on one of them, in layers of one block each."""

    @cache
    def layered(count: int) -> Layered:
        sizes, samples = case.sizes, case.batch // count
        options, trace = Options(), Trace(None)
        with torch.device("meta"):
            if isinstance(sizes, Sizes):
                tokens = torch.zeros(samples, SEQ, dtype=torch.long)
                batch = {"tokens": tokens, "labels": tokens}
                made: torch.nn.Module = GPT(replace(sizes, layers=TRACED)).half()
            else:
                images = torch.zeros(samples, 3, sizes.image, sizes.image)
                batch = {"images": images, "labels": torch.zeros(samples, dtype=torch.long)}
                made = WideResNet(sizes)
        graph = capture_graph(made, (), batch, options, trace, NORMALISING).graph
        whole = prepare(graph, passes=FINDING)
        seconds, _ = weights(graph, whole, case.mesh, options)
        if isinstance(sizes, Sizes):
            return Layered(graph, find_layers(whole, seconds), sizes.layers - TRACED, samples)
        layers = layers_at(whole, seconds, block_ends(list(seconds), graph))
        return Layered(graph, layers, samples=samples)

    return layered


def block_ends(names: list[str], graph: Any) -> list[str]:
    """The last operator of each block of a Wide-ResNet; the stem and the head join one."""
    home = [graph[name].source.module.split(".")[:2] for name in names]
    ends = [at for at in range(len(names)) if home[at][0] == "blocks"]
    last = {home[at][1]: at for at in ends}
    places = sorted(last.values())
    return [names[at] for at in places[:-1]] + [names[-1]]


def published(case: Published, memory: float) -> tuple[Pipeline, float] | None:
    """Alpa's pipeline and its simulated seconds; None where it does not fit."""
    layered = model_on(case)
    parts = {(part.hosts, part.devices): part for part in submeshes(case.mesh)}
    costs = StageCosts(layered, case.mesh, Options(), memory, len(case.stages))
    kinds, rule, count = layered(case.microbatches).kinds, law("1f1b"), case.microbatches
    blocks = sum(number for number, *_ in case.stages)
    stages: list[Stage] = []
    first = 0
    for place, (number, hosts, devices, logical) in enumerate(case.stages):
        last = first + number - 1
        if place == len(case.stages) - 1:
            last += len(kinds) - blocks  # the head, where it is a layer
        part = parts[hosts, devices]
        shaped = replace(part, meshes=tuple(m for m in part.meshes if m.shape == logical))
        kept = rule.in_flight(len(case.stages) - place, len(case.stages), count)
        ways = [way for way in costs(first, last, shaped, count) if way.memory(kept) <= memory]
        if not ways:
            return None
        stages.append(_stage(part, first, last, min(ways, key=lambda way: way.seconds), kept))
        first = last + 1
    pipeline = Pipeline("1f1b", count, tuple(stages), math.nan, math.nan, math.nan)
    transfer = Borders(layered(count), case.mesh, Options()).between(count)
    return pipeline, simulate_pipeline(pipeline, transfer)[0]


def _stage(part: SubMesh, first: int, last: int, way: Candidate, kept: float) -> Stage:
    return Stage(part, (Chunk(first, last, way),), way.seconds, way.once, way.memory(kept))


def compare(case: Published) -> dict[str, Any]:
    """One row: both pipelines."""
    memory = MEMORY
    theirs = published(case, memory)
    if theirs is None:
        memory = math.inf
        theirs = published(case, memory)
    assert theirs is not None
    began = time.perf_counter()
    counts = sorted({case.microbatches, *(case.batch // n for n in SAMPLES if case.batch % n == 0)})
    try:
        ours = search(
            model_on(case),
            case.mesh,
            counts,
            Options(),
            min(memory, 1e15),
            **THOROUGH,
            scaling=True,
        )
    except InfeasibleError as error:
        raise SystemExit(f"{case.model}: {error}") from error
    pipeline, seconds = theirs
    return {
        "model": case.model,
        "gpus": case.hosts * case.devices,
        "memory": "16 GB" if memory == MEMORY else "not limited",
        "alpa_stages": _shape(pipeline),
        "alpa_microbatches": case.microbatches,
        "alpa_seconds": round(seconds, 4),
        "our_stages": _shape(ours.pipeline),
        "our_microbatches": ours.pipeline.microbatches,
        "our_schedule": ours.pipeline.schedule,
        "our_seconds": round(ours.seconds, 4),
        "ours_to_alpa": round(ours.seconds / seconds, 4),
        "search_seconds": round(time.perf_counter() - began, 1),
    }


def _shape(pipeline: Pipeline) -> str:
    """Layers on devices of each stage: "5 on 1x4, 4 on 1x4, 7 on 1x8"."""
    return ", ".join(
        f"{sum(c.last - c.first + 1 for c in stage.chunks)} on {stage.submesh}"
        for stage in pipeline.stages
    )


def main() -> None:
    """Write results/alpa_plans.csv."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", help="a case, such as GPT-1.3B")
    wanted = parser.parse_args().model
    for case in CASES:
        if wanted is None or case.model in wanted:
            row = compare(case)
            print(row, flush=True)
            write("alpa_plans", [row], keys=["model"])


if __name__ == "__main__":
    main()

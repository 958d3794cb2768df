"""Compares partitioners of stages on the same prices: `python -m benchmarks.stage_partitioners`.

Every method divides the layers of a model among parts of a cluster, by its own objective:

    equal         equal numbers of layers on equal numbers of devices, as torch's own split
    proportional  layers in proportion to the speed of the devices of a stage
    pipedream     PipeDream (Narayanan et al., SOSP 2019): data-parallel stages, the slowest fastest
    alpa          Alpa (Zheng et al., OSDI 2022, equation 5): any stages, for 1F1B without messages
    ours, 1f1b    `inter_op.partition` with the same schedule
    ours          `inter_op.partition` with all schedules

The intra-operator solver prices the stages of all, within memory, and one simulator plays their
pipelines action by action, messages between stages included. Of a method without a choice of its
own, the best number of microbatches, sub-mesh and order of unlike parts count. Figures are
simulated. `--only WORD` runs cases whose model contains a word, `--method alpa` one method; rows of
other cases and methods stay, and each row is written when it is known.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import pins
from autopar.cli.common.model_options import model_of_any_size
from autopar.cost.model import AnalyticModel
from autopar.errors import InfeasibleError, PinError
from autopar.inter_op.laws import law
from autopar.inter_op.stage_values import Candidate, Chunk, Pipeline, Stage
from autopar.inter_op.submeshes import SubMesh, submeshes
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.pipelines.automatic import QUICK, THOROUGH, OnMicrobatches
from autopar.planning.pipelines.borders import Borders
from autopar.planning.pipelines.layered import runs
from autopar.planning.pipelines.search import SPARE, search, simulate_pipeline
from autopar.planning.pipelines.stage_costs import StageCosts
from autopar.planning.prices import limits_of
from benchmarks.harness import write

Priced = Callable[[SubMesh], StageCosts]
Cut = Sequence[tuple[int, int, SubMesh]]  # of each stage: its first and last layer, its devices
RULE = law("1f1b")
MANY = 64  # devices from which the search makes less effort, as on the command line


@dataclass(frozen=True)
class Case:
    """A model, a cluster and the samples of a step."""

    model: str
    mesh: str
    batch: int
    layers: int | None = None


CASES = (
    Case("gpt-1.3b", "V100: node=2, gpu=4", 256),
    Case("llama-3-8b", "H100: node=4, gpu=8", 256),
    Case("gpt-1.3b", "A100-80: gpu=8 + V100: gpu=8", 256),
    Case("llama-3-8b", "H100: node=2, gpu=8 + A100-80: node=4, gpu=8", 384),
    Case("llama-2-7b", "H100: node=2, gpu=8 + V100: node=2, gpu=8", 256),
)


class Bench:
    """The prices and the judge of one case."""

    def __init__(self, case: Case) -> None:
        self.case, self.mesh = case, Mesh.parse(case.mesh)
        self.effort = THOROUGH if self.mesh.size < MANY else QUICK
        self.options = Options(precision=Precision.read("fp16" if "V100" in case.mesh else "bf16"))
        spec = ModelSpec(case.model, None, None, case.layers)
        self.model = OnMicrobatches(
            model_of_any_size(spec, self.options), case.batch, self.mesh, self.options
        )
        self.limits = limits_of(self.mesh, self.options)
        self.parts = submeshes(self.mesh)
        self.counts = [case.batch // 2**k for k in range(8) if case.batch // 2**k >= 4]
        self.costs = self.prices(self.options)
        self.fewest = min(self.counts)
        self.layers = self.model(self.fewest)
        self.kinds = self.layers.kinds
        self.borders = Borders(self.layers, self.mesh, self.options)

    def prices(self, options: Options) -> StageCosts:
        """Returns prices of stages under other options, on as many logical shapes as ours tries."""
        room = {kind: (1 - SPARE) * nbytes for kind, nbytes in self.limits.items()}
        shapes = self.effort["shapes"]
        return StageCosts(self.model, self.mesh, options, room, most=256, shapes=shapes)

    def seconds(self, cut: Cut, count: int, priced: Priced | None = None) -> float:
        """Returns the simulated seconds of a step under 1F1B; infinite if it does not fit."""
        stages = []
        for at, (first, last, part) in enumerate(cut):
            kept = RULE.in_flight(len(cut) - at, len(cut), count)
            room = self.costs.memory[part.meshes[0].kind]
            costs = self.costs if priced is None else priced(part)
            try:
                ways = costs(first, last, part, count)
            except PinError:  # a microbatch does not divide into so many replicas
                return math.inf
            fits = [way for way in ways if way.memory(kept) <= room]
            if not fits or not RULE.fits(len(cut), count):
                return math.inf
            way = min(fits, key=lambda way: count * way.seconds + way.once)
            stages.append(_stage(part, first, last, way, kept))
        pipeline = Pipeline("1f1b", count, tuple(stages), math.inf, 0.0, 0.0)
        return simulate_pipeline(pipeline, self.borders.between(self.fewest))[0]

    @cached_property
    def weights(self) -> list[list[float]]:
        """Seconds of every layer on one device of each part, on the largest microbatch."""
        return [
            [self.costs.alone(kind, self.fewest, part)[0] for kind in self.kinds]
            for part in range(len(self.mesh.parts))
        ]

    def rows_of_parts(self) -> Iterator[tuple[SubMesh, ...]]:
        """Yields rows of stages with equal numbers of devices that make up the cluster."""
        for size in sorted({part.size for part in self.parts}):
            held = [[p for p in self.parts if p.part == n and p.size == size] for n in self.numbers]
            whole = [part.size for part in self.mesh.parts]
            if not all(held) or any(each % size for each in whole):
                continue
            rows = [row * (each // size) for row, each in zip(held, whole, strict=True)]
            for order in permutations(self.numbers):
                stages = tuple(part for number in order for part in rows[number])
                if len(stages) <= len(self.kinds):
                    yield stages

    @property
    def numbers(self) -> range:
        """The numbers of the parts of the cluster."""
        return range(len(self.mesh.parts))


def _stage(part: SubMesh, first: int, last: int, way: Candidate, kept: float) -> Stage:
    return Stage(part, (Chunk(first, last, way),), way.seconds, way.once, way.memory(kept))


Answer = tuple[float, str, int, int]  # seconds, schedule, microbatches, stages


def _best(bench: Bench, cuts: Iterator[Cut], priced: Priced | None = None) -> Answer:
    """Returns the fastest of some cuts with any number of microbatches."""
    best: Answer = (math.inf, "1f1b", 0, 0)
    for cut in cuts:
        for count in bench.counts:
            best = min(best, (bench.seconds(cut, count, priced), "1f1b", count, len(cut)))
    return best


def equal(bench: Bench) -> Answer:
    """Equal numbers of layers on equal numbers of devices."""

    def cuts() -> Iterator[Cut]:
        for parts in bench.rows_of_parts():
            split = np.array_split(np.arange(len(bench.kinds)), len(parts))
            yield [(int(s[0]), int(s[-1]), part) for s, part in zip(split, parts, strict=True)]

    return _best(bench, cuts())


def proportional(bench: Bench) -> Answer:
    """Contiguous layers whose work is nearest to the speed of their devices."""
    speeds = [1 / sum(row) for row in bench.weights]
    work = np.cumsum([0.0, *bench.weights[0]]) / sum(bench.weights[0])

    def cuts() -> Iterator[Cut]:
        for parts in bench.rows_of_parts():
            shares = np.cumsum([speeds[part.part] * part.size for part in parts])
            ends, layers = [0], len(bench.kinds)
            for at, share in enumerate(shares[:-1] / shares[-1], 1):
                end = int(np.abs(work - share).argmin())
                ends.append(min(max(end, ends[-1] + 1), layers - len(parts) + at))
            ends.append(layers)
            yield [(a, b - 1, part) for (a, b), part in zip(pairwise(ends), parts, strict=True)]

    return _best(bench, cuts())


def pipedream(bench: Bench) -> Answer:
    """PipeDream's dynamic program: the slowest stage is as fast as possible, stages replicate."""
    weights, sizes = bench.weights[0], {part.size: part for part in bench.parts}
    held = [bench.costs.alone(kind, bench.fewest)[1] / 8 for kind in bench.kinds]  # bytes, 16 bit
    layers, total = len(weights), bench.mesh.size
    link = AnalyticModel(bench.mesh).network.levels((bench.mesh.names[0],))[0].bandwidth
    before = [0.0, *(bench.borders.nbytes(pair)[0] for pair in pairwise(bench.kinds))]
    at = np.cumsum([0.0, *weights]), np.cumsum([0.0, *held])
    best = np.full((layers + 1, total + 1), np.inf)
    best[0, 0] = 0.0
    origin: dict[tuple[int, int], tuple[int, int]] = {}
    for last in range(1, layers + 1):
        for first in range(last):
            work, nbytes = at[0][last] - at[0][first], at[1][last] - at[1][first]
            sent = 2 * before[first] / link
            for size in sizes:
                stage = max(work, 2 * (size - 1) * nbytes / link / bench.fewest) / size
                for used in range(total - size + 1):
                    slowest = max(best[first, used], stage, sent)
                    if slowest < best[last, used + size]:
                        best[last, used + size] = slowest
                        origin[last, used + size] = first, size
    cut: list[tuple[int, int, SubMesh]] = []
    last, used = layers, total
    while last:
        first, size = origin[last, used]
        cut.append((first, last - 1, sizes[size]))
        last, used = first, used - size

    def priced(part: SubMesh) -> StageCosts:
        replicas = [pins.data_parallel(a.name) for a in part.meshes[0].axes if a.size > 1]
        return bench.prices(replace(bench.options, pins=replicas or None, state="ddp"))

    narrow = [(a, b, replace(part, meshes=part.meshes[:1])) for a, b, part in reversed(cut)]
    return _best(bench, iter([narrow]), cache(priced))


def alpa(bench: Bench) -> Answer:
    """Alpa's dynamic program over all stages, with the sum of stages plus the slowest as time."""
    best: tuple[float, int, Cut] = (math.inf, 0, ())
    for count in bench.counts:
        total, cut = _alpa_cut(bench, count, best[0])
        best = min(best, (total, count, cut), key=lambda one: one[0])
    seconds = bench.seconds(best[2], best[1]) if best[2] else math.inf
    return seconds, "1f1b", best[1], len(best[2])


def _alpa_cut(bench: Bench, count: int, cutoff: float) -> tuple[float, Cut]:
    """Returns the least sum of t + (B - 1) max t below a cutoff, and its stages."""
    parts, layers, devices = bench.parts, len(bench.kinds), bench.mesh.size
    priced: dict[Any, tuple[Candidate, ...]] = {}
    options: list[tuple[int, int, int, Candidate]] = []
    for first in range(layers):
        for last in range(first, layers):
            for q, part in enumerate(parts):
                key = runs(bench.kinds[first : last + 1]), q
                if key not in priced:
                    priced[key] = bench.costs(first, last, part, count)
                options += [(first, last, q, way) for way in priced[key]]
    found: tuple[float, Cut] = (cutoff, ())
    slowest = 0.0
    for most in sorted({way.seconds for *_, way in options}):
        if (count - 1) * most >= found[0]:
            break
        if most < 1.01 * slowest:  # thresholds nearer than one per cent count as one
            continue
        slowest = most
        allowed = [row for row in options if row[3].seconds <= most]
        total, cut = _alpa_sum(bench, allowed, layers, devices)
        if total + (count - 1) * most < found[0]:
            found = total + (count - 1) * most, cut
    return found if found[1] else (math.inf, ())


def _alpa_sum(
    bench: Bench, options: Sequence[tuple[int, int, int, Candidate]], layers: int, devices: int
) -> tuple[float, Cut]:
    """Returns the least sum of stages' seconds that use all devices within memory, and them."""
    table = np.full((layers + 1, devices + 1), np.inf)  # of the stages from a layer on
    table[layers, 0] = 0.0
    best, ends = (math.inf, 0), []
    for stages in range(1, min(layers, devices) + 1):
        fresh, choice = np.full_like(table, np.inf), np.full(table.shape, -1)
        for number, (first, last, q, way) in enumerate(options):
            part = bench.parts[q]
            if way.memory(stages) > bench.costs.memory[part.meshes[0].kind]:
                continue
            total = way.seconds + table[last + 1, : devices + 1 - part.size]
            better = total < fresh[first, part.size :]
            fresh[first, part.size :][better] = total[better]
            choice[first, part.size :][better] = number
        ends.append(choice)
        table = fresh
        best = min(best, (float(table[0, devices]), stages))
        if not np.isfinite(table).any():
            break
    cut, first, left = [], 0, devices
    for stages in range(best[1], 0, -1):
        one, last, q, _ = options[int(ends[stages - 1][first, left])]
        cut.append((one, last, bench.parts[q]))
        first, left = last + 1, left - bench.parts[q].size
    return best[0], cut


def ours(bench: Bench, schedules: Sequence[str] = ()) -> Answer:
    """The search of autopar."""
    found = search(
        bench.model, bench.mesh, bench.counts, bench.options, bench.limits,
        schedules=schedules, scaling=True, **bench.effort,
    )  # fmt: skip
    one = found.pipeline
    return found.seconds, one.schedule, one.microbatches, len(one.stages)


def ours_1f1b(bench: Bench) -> Answer:
    """The search of autopar among pipelines under 1F1B."""
    return ours(bench, ("1f1b",))


METHODS: dict[str, Callable[[Bench], Answer]] = {
    "equal": equal, "proportional": proportional, "pipedream": pipedream, "alpa": alpa,
    "ours, 1f1b": ours_1f1b, "ours": ours,
}  # fmt: skip
ONE_KIND = ("pipedream", "alpa")  # published for equal devices


def rows(case: Case, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each method."""
    bench = Bench(case)
    for name in names:
        if bench.mesh.unlike and name in ONE_KIND:
            continue
        began = time.process_time()
        try:
            seconds, schedule, count, stages = METHODS[name](bench)
        except InfeasibleError:
            seconds, schedule, count, stages = math.inf, "", 0, 0
        row: dict[str, Any] = {"model": case.model, "mesh": case.mesh, "batch": case.batch}
        row |= {"method": name, "schedule": schedule, "microbatches": count, "stages": stages}
        row["step_seconds"] = round(seconds, 4)
        row["processor_seconds"] = round(time.process_time() - began, 1)
        print(row, flush=True)
        yield row


def main() -> None:
    """Write results/stage_partitioners.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="a word of the model or the mesh")
    parser.add_argument("--case", type=int, action="append", help="a number of a case, from 0")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all of them")
    asked = parser.parse_args()
    for number, case in enumerate(CASES):
        chosen = asked.case is None or number in asked.case
        if chosen and asked.only in f"{case.model} on {case.mesh}":
            for row in rows(case, asked.method or tuple(METHODS)):
                write("stage_partitioners", [row], keys=["model", "mesh", "batch", "method"])


if __name__ == "__main__":
    main()

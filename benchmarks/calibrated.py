"""Compares predicted and measured step times on this machine: `python benchmarks/calibrated.py`.

Three small models, of widths 128, 256 and 512, each with two batch sizes, train with five plans
chosen in advance, on four processes. The measured seconds of a step are compared with the
simulator's under a calibration, with the plan's own sum of prices under the first calibration, and
with the simulator's under closed forms, which know nothing of this machine. No step is used to fit
anything.

The speed of a shared machine drifts over minutes. So it is calibrated several times, and the plans
train in between, some steps each time; each problem of the calibration counts with its median. Each
plan trains in processes of its own, as users' plans do, because steps take a fifth longer in
processes that hold the tensors of other programs. The first steps do not count. A step's time is
that of the slowest process, and the median over steps. The last lines print the rank correlation
(Spearman) and the median error of each prediction. Writes results/calibrated.csv and
docs/images/calibrated.svg. The machine must be idle.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import log10
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autopar import pins
from autopar.codegen.emit import emit
from autopar.cost.calibration import Calibration
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel
from autopar.cost.work import optimizer_work
from autopar.intra_op.rules import rules
from autopar.intra_op.work.kernel_work import works
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.communication.measure import middle as middle_point
from autopar.runtime.executor import Executor
from autopar.runtime.generated import Generated
from autopar.runtime.module_loader import load
from autopar.runtime.runtime import Runtime
from autopar.runtime.update.update import Training
from autopar.session.compiled import values_of
from autopar.simulate import run, tasks
from autopar.stage_plan import StagePlan
from benchmarks.harness import PICTURES, ROOT, middle, write
from tests.support import models
from tests.support.models import Model
from tests.support.ranks import run_ranks

MESH = "cpu: node=2, gpu=2"  # one, so that all plans are priced by one calibration
PARTS = 2  # calibrations, and as often all plans take their turns
STEPS, WARMUP = 6, 3  # of each plan in each part


def gpt2(batch: int) -> Model:
    """Four layers of width 128 on rows of 128 tokens, where waiting outweighs all else."""
    sizes = {"vocab_size": 1024, "n_positions": 128, "n_embd": 128, "n_head": 4}
    return models.gpt2(4, batch=batch, seq=128, **sizes)


def llama(batch: int) -> Model:
    """Four layers of width 256 on rows of 256 tokens, where activations outweigh parameters."""
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return models.llama(4, batch=batch, seq=256, max_position_embeddings=256, **sizes, **heads)


def vit(batch: int) -> Model:
    """Three layers of width 512 on 64 patches, where parameters outweigh activations."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    images = {"image_size": 64, "patch_size": 8, "num_channels": 3, "num_labels": 16}
    return models.vit(3, batch=batch, **sizes, **images)


MODELS: dict[str, Callable[[int], Model]] = {"gpt2": gpt2, "llama": llama, "vit": vit}
BATCHES = (4, 16)
PINS: dict[str, pins.PinsLike] = {
    "data_parallel": pins.data_parallel(),
    "fsdp": pins.fsdp(),
    "data_parallel x megatron": [pins.data_parallel("node"), pins.megatron("gpu")],
    "data_parallel x megatron_sp": [pins.data_parallel("node"), pins.megatron_sp("gpu")],
    "fsdp x megatron": [pins.fsdp("node"), pins.megatron("gpu")],
}
COLOURS = {"gpt2": "#06c", "llama": "#0b6", "vit": "#c60"}


@dataclass(frozen=True)
class Case:
    """A plan for a model and a batch; `program` is what a process needs to train under it."""

    model: str
    batch: int
    pins: str
    graph: Graph
    plan: StagePlan
    program: dict[str, Any]


def cases(names: list[str], file: Path) -> Iterator[Case]:
    """Every plan, made under the calibration in `file`."""
    prices = MeasuredModel(Mesh.parse(MESH), Calibration.load(file)).collective
    for name in names:
        for size in BATCHES:
            torch.manual_seed(0)
            model, batch = MODELS[name](size)
            captured = capture_graph(model, (), batch, Options(), Trace(None))
            values = values_of(model, captured)
            tied = {k: v for k, v in captured.parameter_names.items() if k != v}
            inputs = captured.inputs.flatten((), batch)
            for word, said in PINS.items():
                options = Options(pins=said, calibration=file)
                plan = make_plan(captured.graph, Mesh.parse(MESH), options, Trace(None))
                source = emit(captured.graph, plan, prices)
                program = {"source": source, "values": values, "tied": tied, "batch": inputs}
                yield Case(name, size, word, captured.graph, plan, program)


def predicted(graph: Graph, plan: StagePlan, calibration: Calibration) -> dict[str, float]:
    """Seconds of a step by each of the predictions."""
    kernels, measured = works(graph, plan, rules()), MeasuredModel(plan.mesh, calibration)
    closed = AnalyticModel(plan.mesh)
    slowdown = closed.device.slowdown
    updates = sum(
        measured.compute(optimizer_work(layout.local_bytes(leaf.type, plan.mesh), 2.0, "f32"))
        for leaf in graph.leaves("param")
        for _, layout in plan.nodes[graph.template[leaf.name]].results
    )
    return {
        "simulated": run(tasks(graph, plan, kernels, measured), measured, slowdown).seconds,
        "summed": plan.predicted.step_seconds + updates,
        "closed_form": run(tasks(graph, plan, kernels, closed), closed, slowdown).seconds,
    }


def _train(program: dict[str, Any]) -> list[float]:
    """One process: seconds of the steps of a program."""
    training = Training(partial(torch.optim.AdamW, lr=1e-4))
    runtime = Runtime(Mesh.parse(MESH), torch.device("cpu"))
    module = Generated.of(load(program["source"], "<program>"))
    executor = Executor(module, runtime, program["values"], training, tied=program["tied"])
    return [_step(executor, program["batch"]) for _ in range(WARMUP + STEPS)][WARMUP:]


def _step(executor: Executor, batch: dict[str, Tensor]) -> float:
    """Seconds of one step, the slowest process's."""
    dist.barrier()
    began = time.perf_counter()
    executor.step(batch)
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def calibrated(file: Path) -> Calibration:
    """This machine, measured now and kept in a file."""
    command = [sys.executable, "-c", "from autopar.cli import main; main()", "calibrate"]
    subprocess.run([*command, "--mesh", MESH, "-o", str(file), "--json"], cwd=ROOT,
                   stdout=subprocess.DEVNULL, check=True)  # fmt: skip
    return Calibration.load(file)


def middle_of(parts: list[Calibration]) -> Calibration:
    """Returns a calibration of the same problems, each with the median of its times."""
    return replace(
        parts[0],
        products=tuple(middle_point([part.products for part in parts])),
        kernels=tuple(middle_point([part.kernels for part in parts])),
        exchanges=tuple(middle_point([part.exchanges for part in parts])),
    )


def rows(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """One row a plan."""
    parts = [calibrated(folder / "0.toml")]
    began = time.perf_counter()
    made = list(cases(names, folder / "0.toml"))
    print(f"{len(made)} plans made in {time.perf_counter() - began:.0f} s", flush=True)
    taken: list[list[float]] = [[] for _ in made]
    for number in range(PARTS):
        if number:
            parts.append(calibrated(folder / f"{number}.toml"))
        for case, seconds in zip(made, taken, strict=True):
            seconds += run_ranks(_train, case.program)[0]
    known = middle_of(parts)
    for case, seconds in zip(made, taken, strict=True):
        row = {"model": case.model, "batch": case.batch, "mesh": MESH, "plan": case.pins}
        row |= {"measured": middle(seconds), "fastest": min(seconds), "slowest": max(seconds)}
        row |= predicted(case.graph, case.plan, known)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        yield row


def verdict(found: list[dict[str, Any]], by: str) -> tuple[float, float]:
    """Returns rank correlation and median relative error of predicted and measured times."""
    told = np.array([[row["measured"], row[by]] for row in found]).T
    ranks = np.argsort(np.argsort(told, axis=1), axis=1)
    return float(np.corrcoef(ranks[0], ranks[1]).flat[1]), float(
        np.median(np.abs(told[1] / told[0] - 1))
    )


def drawn(found: list[dict[str, Any]]) -> str:
    """A picture: predicted against measured seconds, both logarithmic; lines: equal, 20 % off."""
    size, margin = 400, 50
    values = [float(row[key]) for row in found for key in ("measured", "simulated")]
    low, high = log10(min(values)) - 0.05, log10(max(values)) + 0.05

    def place(x: float, y: float) -> tuple[float, float]:
        right, up = ((log10(v) - low) / (high - low) * size for v in (x, y))
        return margin + right, margin + size - up

    parts = [
        f'<rect width="{size + 2 * margin}" height="{size + 2 * margin}" fill="#fff"/>',
        f'<rect x="{margin}" y="{margin}" width="{size}" height="{size}" fill="none" '
        'stroke="#999"/>',
        f'<text x="{margin + 60}" y="{size + 2 * margin - 18}">measured seconds of a step '
        f"({10**low:.2g} to {10**high:.2g}, log)</text>",
        f'<text x="18" y="{margin + 300}" transform="rotate(-90 18 {margin + 300})">predicted '
        "(lines: equal, 20 % off)</text>",
    ]
    for factor, dash in ((1.0, ""), (1.2, "4"), (0.8, "4")):
        ends = (max(10**low, 10**low / factor), min(10**high, 10**high / factor))
        (x1, y1), (x2, y2) = (place(x, x * factor) for x in ends)
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#999" '
            f'stroke-dasharray="{dash}"/>'
        )
    for k, (name, colour) in enumerate(COLOURS.items()):
        parts.append(
            f'<text x="{margin + 8}" y="{margin + 16 + 14 * k}" fill="{colour}">{name}</text>'
        )
    for row in found:
        x, y = place(row["measured"], row["simulated"])
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[row["model"]]}" '
            f'fill-opacity="0.6"><title>{row["model"]}, batch {row["batch"]}, {row["plan"]}'
            "</title></circle>"
        )
    whole = size + 2 * margin
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{whole}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Measure, predict, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(Path(folder), arguments.models))
    for by in ("simulated", "summed", "closed_form"):
        correlation, error = verdict(found, by)
        print(f"{by}: rank correlation {correlation:.3f}, median error {error:.1%}")
    print(write("calibrated", found))
    (PICTURES / "calibrated.svg").write_text(drawn(found), encoding="utf-8")


if __name__ == "__main__":
    main()

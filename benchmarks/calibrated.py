"""Predicted against measured step time on this machine: `python benchmarks/calibrated.py`.

The machine is calibrated with four processes on each of two meshes. Then three small models train
under ten plans each, fixed beforehand, and the seconds of a step are compared with the simulator's
under the calibration, with the plan's own sum of prices, and with the simulator's under the closed
forms, which know nothing of this machine. No step is used to fit anything.

A step's time is the slowest process's, the median over steps. The last rows tell the rank
correlation (Spearman) and the median error of each prediction. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import autopar
from autopar import pins
from autopar.cost.calibration import Calibration
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel
from autopar.cost.work import optimizer_work
from autopar.intra_op.rules import rules
from autopar.intra_op.works import works
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.single import Options, Trace, capture_graph, make_plan
from autopar.simulate import run, tasks
from benchmarks.harness import ROOT, middle, write
from tests import models
from tests.models import Model

MESHES = ("cpu: gpu=4", "cpu: node=2, gpu=2")
STEPS, WARMUP = 9, 2


def gpt2() -> Model:
    """Four layers of width 384."""
    return models.gpt2(4, seq=128, vocab_size=2048, n_positions=128, n_embd=384, n_head=8)


def llama() -> Model:
    """Four layers of width 256 on long rows, where activations outweigh parameters."""
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return models.llama(4, seq=256, max_position_embeddings=256, **sizes, **heads)


def vit() -> Model:
    """Three layers of width 512 on few patches, where parameters outweigh activations."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    images = {"image_size": 64, "patch_size": 8, "num_channels": 3, "num_labels": 16}
    return models.vit(3, **sizes, **images)


MODELS: dict[str, Callable[[], Model]] = {"gpt2": gpt2, "llama": llama, "vit": vit}
PINS: dict[str, dict[str, pins.PinsLike | None]] = {
    MESHES[0]: {
        "data_parallel": pins.data_parallel(),
        "fsdp": pins.fsdp(),
        "megatron": pins.megatron("gpu"),
        "megatron_sp": pins.megatron_sp("gpu"),
        "found": None,
    },
    MESHES[1]: {
        "fsdp": pins.fsdp(),
        "data_parallel x megatron": [pins.data_parallel("node"), pins.megatron("gpu")],
        "data_parallel x megatron_sp": [pins.data_parallel("node"), pins.megatron_sp("gpu")],
        "fsdp x megatron": [pins.fsdp("node"), pins.megatron("gpu")],
        "megatron x data_parallel": [pins.megatron("node"), pins.data_parallel("gpu")],
    },
}


def captured(name: str) -> Graph:
    """The prepared graph of a model of this file."""
    model, batch = MODELS[name]()
    return capture_graph(model, (), batch, Options(), Trace(None)).graph


def predicted(graph: Graph, plan: Plan, calibration: Calibration) -> dict[str, float]:
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
        "summed": plan.predicted["step_seconds"] + updates,
        "closed_form": run(tasks(graph, plan, kernels, closed), closed, slowdown).seconds,
    }


def _train(rank: int, folder: str, name: str, files: list[str]) -> None:
    """One process: the step times of a model's plans 0.toml, ..., each with its calibration."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    programs = []
    for number, file in enumerate(files):
        plan = Plan.load(Path(folder, f"{number}.toml"))
        factory = partial(torch.optim.AdamW, lr=1e-4)
        program = autopar.compile(
            model, plan.mesh, plan=plan, optimizer=factory, example_inputs=batch, calibration=file
        )
        programs.append(program)
    # In turns: what disturbs the machine for a while disturbs all plans alike.
    rounds = [[_step(program, batch) for program in programs] for _ in range(WARMUP + STEPS)]
    found = [list(steps) for steps in zip(*rounds[WARMUP:], strict=True)]
    if rank == 0:
        torch.save(found, Path(folder, "seconds.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _step(program: autopar.Program, batch: dict[str, Tensor]) -> float:
    """Seconds of one step, the slowest process's."""
    dist.barrier()
    began = time.perf_counter()
    program.step(**batch)
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def calibrations(folder: Path) -> dict[str, Calibration]:
    """Each mesh's, from the folder or measured now."""
    found = {}
    for mesh in MESHES:
        file = folder / _file(mesh)
        if not file.exists():
            command = [sys.executable, "-c", "from autopar.cli import main; main()", "calibrate"]
            subprocess.run([*command, "--mesh", mesh, "-o", str(file), "--json"], cwd=ROOT,
                           stdout=subprocess.DEVNULL, check=True)  # fmt: skip
        found[mesh] = Calibration.load(file)
    return found


def rows(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """One row a plan."""
    known = calibrations(folder)
    for name in names:
        graph, made = captured(name), list[tuple[str, str, Plan]]()
        for mesh, words in PINS.items():
            for word, said in words.items():
                options = Options(pins=said, calibration=folder / _file(mesh))
                plan = make_plan(graph, Mesh.parse(mesh), options, Trace(None))
                made.append((mesh, word, plan))
        files = [str(folder / _file(mesh)) for mesh, _, _ in made]
        measured = _measured(name, [plan for _, _, plan in made], files)
        for (mesh, word, plan), seconds in zip(made, measured, strict=True):
            row = {"model": name, "mesh": mesh, "plan": word, "measured": middle(seconds)}
            row |= {"fastest": min(seconds), "slowest": max(seconds)}
            row |= predicted(graph, plan, known[mesh])
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            yield row


def _file(mesh: str) -> str:
    return f"calibration{MESHES.index(mesh)}.toml"


def _measured(name: str, plans: list[Plan], files: list[str]) -> list[list[float]]:
    """The steps of each plan, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        for number, plan in enumerate(plans):
            replace(plan, model={}).save(Path(folder, f"{number}.toml"))
        spawn(_train, args=(folder, name, files), nprocs=4)
        found: list[list[float]] = torch.load(Path(folder, "seconds.pt"))
        return found


def verdict(found: list[dict[str, Any]], by: str) -> tuple[float, float]:
    """Rank correlation of a prediction with what was measured, and the median relative error."""
    told = np.array([[row["measured"], row[by]] for row in found]).T
    ranks = np.argsort(np.argsort(told, axis=1), axis=1)
    return float(np.corrcoef(ranks[0], ranks[1]).flat[1]), float(
        np.median(np.abs(told[1] / told[0] - 1))
    )


def main() -> None:
    """Measure, predict, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--calibrations", type=Path, help="a folder to keep them in")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.calibrations or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = list(rows(folder, arguments.models))
    for by in ("simulated", "summed", "closed_form"):
        correlation, error = verdict(found, by)
        print(f"{by}: rank correlation {correlation:.3f}, median error {error:.1%}")
    print(write("calibrated", found))


if __name__ == "__main__":
    main()

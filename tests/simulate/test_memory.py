"""Predicted against measured bytes: every storage that four ranks allocate in a training step."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import autopar
from autopar.capture.capture import Captured
from autopar.cost.model import AnalyticModel
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import works
from autopar.ir.fusion import ASYNC
from autopar.ir.offload import left_of
from autopar.ir.precision import Precision
from autopar.ir.recompute import Recompute, run_names
from autopar.pins import PinFunction, data_parallel, fsdp, megatron, megatron_sp
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.offloading import parse_offload
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import Task, run, settings_on, tasks
from autopar.stage_plan import StagePlan
from tests.support import models
from tests.support.memory import Measured, measured_step, simulated_levels
from tests.support.ranks import run_ranks

FLAT, GRID = "cpu: gpu=4", "cpu: data=2, tensor=2"
PLANS: dict[str, tuple[str, list[PinFunction]]] = {
    "data parallel": (FLAT, [data_parallel("gpu")]),
    "Megatron": (FLAT, [megatron("gpu")]),
    "batch x tensor": (GRID, [data_parallel("data"), megatron("tensor")]),
    "sequence": (GRID, [data_parallel("data"), megatron_sp("tensor")]),
    "ZeRO-3": (FLAT, [fsdp("gpu")]),
    "free": (GRID, []),
}
NAMES = ("gpt2", "llama", "vit")
WORDS, WIDTH, SEQ, BATCH = 512, 128, 64, 8
Batch = dict[str, torch.Tensor]


def make(name: str, layers: int) -> models.Model:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_positions": SEQ}
    elif name == "llama":
        sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH}
        sizes |= {"num_key_value_heads": 4, "max_position_embeddings": SEQ}
    else:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_labels": 64}
    return models.MODELS[name](layers=layers, batch=BATCH, seq=SEQ, **sizes)


@dataclass(frozen=True)
class Case:
    """A model under a plan, captured and planned once for all ranks."""

    name: str
    layers: int
    plan: StagePlan
    captured: Captured

    def simulated(self) -> tuple[Task, ...]:
        graph, model = self.captured.graph, AnalyticModel(self.plan.mesh)
        settings = settings_on("cpu")  # where the ranks are, whatever the plan is for
        return tasks(graph, self.plan, works(graph, self.plan, table()), model, settings)

    def measured(self) -> Measured:
        model, batch = make(self.name, self.layers)
        compiler = importlib.import_module("autopar.session.compiler")
        with patch.object(compiler, "capture_parts", lambda *_: self.captured):
            program = autopar.compile(
                model,
                self.plan.mesh,
                plan=Plan.of(self.plan),
                example_inputs=batch,
                optimizer=torch.optim.AdamW,
            )
        executor: Any = program._executor
        return measured_step(executor, self.captured.inputs.flatten((), batch))


def cases(name: str, plans: list[str], layers: int, precision: str = "") -> list[Case]:
    model, batch = make(name, layers)
    nothing = Trace(None)
    mixed = Options(precision=Precision.read(precision))
    captured = capture_graph(model, (), batch, mixed, nothing)
    made = []
    for plan in plans:
        mesh, pins = PLANS[plan]
        options = replace(mixed, pins=pins)
        chosen = make_plan(captured.graph, autopar.Mesh.parse(mesh), options, nothing)
        made.append(Case(name, layers, chosen, captured))
    return made


def measure(every: list[Case]) -> list[Measured]:
    return [case.measured() for case in every]


def compare(every: list[Case], within: float) -> None:
    """Peaks and ends of forward, backward and step, and the engine's peak.

    A thread of gloo's may hold what it has sent a moment longer, so that of the ranks, which hold
    as much each, the least counts.
    """
    found = run_ranks(measure, every)
    for number, case in enumerate(every):
        made = case.simulated()
        peaks, ends = simulated_levels(made)
        model = AnalyticModel(case.plan.mesh)
        peak = run(made, model, model.device.slowdown).memory.peak
        ranks = [rank[number] for rank in found]
        assert peak == pytest.approx(min(one.peak for one in ranks), rel=within)
        for simulated, measured in (
            (peaks, [one.peaks() for one in ranks]),
            (ends, [one.ends() for one in ranks]),
        ):
            least = tuple(map(min, zip(*measured, strict=True)))
            assert simulated == pytest.approx(least, rel=within)


# The slow test takes every plan of every model.
QUICK = {"gpt2": ["batch x tensor"], "llama": ["Megatron", "data parallel"]}


RECOMPUTED = ("full 1", "selective 2")


def recomputing(case: Case, how: str) -> Case:
    """The same with the first blocks computed again."""
    (run_name,) = run_names(case.captured.graph)
    return replace(case, plan=replace(case.plan, recompute={run_name: Recompute.parse(how)}))


OFFLOADED = ("optimizer", "activations 4", "optimizer+activations")


def offloading(case: Case, what: str) -> Case:
    """The same with something in host memory, behind what is computed again."""
    whole = parse_offload(case.captured.graph, what)
    offload = left_of(case.captured.graph, whole, case.plan.recompute)
    return replace(case, plan=replace(case.plan, offload=offload))


def fusing(case: Case) -> Case:
    """The same with AdamW's kernel."""
    return replace(case, plan=replace(case.plan, fuse=("adamw",)))


def test_predicted_bytes_are_measured_bytes_with_the_optimizers_kernel() -> None:
    compare([fusing(case) for case in cases("gpt2", ["ZeRO-3"], 2)], 0.05)


def test_predicted_bytes_are_measured_bytes() -> None:
    plain, *others = [case for name, plans in QUICK.items() for case in cases(name, plans, 2)]
    again = [recomputing(case, how) for case, how in zip(others, RECOMPUTED, strict=True)]
    compare([plain, *again, offloading(plain, "optimizer+activations")], 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_predicted_bytes_are_measured_bytes_under_every_plan(name: str) -> None:
    every = cases(name, list(PLANS), 6)
    again = [recomputing(case, how) for case in every for how in ("full 6", "selective 4")]
    away = [offloading(case, how) for case in every for how in OFFLOADED]
    away += [offloading(case, "activations") for case in again]
    compare([*every, *again, *away], 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_predicted_bytes_are_measured_bytes_beside_linears(name: str) -> None:
    """Collectives that overlap with linears, which on CPUs run one after the other."""
    model, batch = make(name, 4)
    options = Options(pins=PLANS["sequence"][1], fuse=(ASYNC,))
    captured = capture_graph(model, (), batch, options, Trace(None))
    mesh = autopar.Mesh.parse(GRID.replace("cpu", "H100"))
    plan = make_plan(captured.graph, mesh, options, Trace(None))
    assert plan.fused[ASYNC].count >= 16
    compare([Case(name, 4, plan, captured)], 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [
        "bf16",
        "bf16 communication=bf16",
        "bf16 sums=f32",
        "weights=int8 gradients=int8",
        "bf16 gradients=int8",
        pytest.param(
            "gradients=1-bit",
            marks=pytest.mark.xfail(
                reason="the peak of a backward that scatters 1-bit gradients is predicted 7 % high"
            ),
        ),
    ],
)
def test_predicted_bytes_are_measured_bytes_in_mixed_precision(precision: str) -> None:
    plans = ["data parallel", "Megatron", "batch x tensor", "ZeRO-3"]
    every = cases("gpt2", plans, 2, precision)
    away = [offloading(case, "optimizer") for case in every[1::2]]
    compare([*every, *map(fusing, every), *away], 0.05)

"""Predicted against measured bytes: every storage that four ranks make in a training step."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import autopar
from autopar.cost.model import AnalyticModel
from autopar.intra_op.table import table
from autopar.intra_op.works import works
from autopar.ir.capture import Captured
from autopar.pins import Word, data_parallel, fsdp, megatron, megatron_sp
from autopar.plan import Plan
from autopar.simulate import Task, run, tasks
from tests.memory import Measured, measured_step, simulated_levels
from tests.ranks import run_ranks

compiler = importlib.import_module("autopar.compile")
FLAT, GRID = "cpu: gpu=4", "cpu: data=2, tensor=2"
PLANS: dict[str, tuple[str, list[Word]]] = {
    "data parallel": (FLAT, [data_parallel("gpu")]),
    "Megatron": (FLAT, [megatron("gpu")]),
    "batch x tensor": (GRID, [data_parallel("data"), megatron("tensor")]),
    "sequence": (GRID, [data_parallel("data"), megatron_sp("tensor")]),
    "ZeRO-3": (FLAT, [fsdp("gpu")]),
    "free": (GRID, []),
}
WORDS, WIDTH, SEQ, BATCH = 512, 128, 64, 8
Batch = dict[str, torch.Tensor]


def gpt2(layers: int) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=SEQ,
            n_embd=WIDTH,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
        )
    )


def llama(layers: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=SEQ,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def vit(layers: int) -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=4,
            image_size=32,
            patch_size=4,
            num_channels=4,
            num_labels=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
    )


MODELS = {"gpt2": gpt2, "llama": llama, "vit": vit}


def make(name: str, layers: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = MODELS[name](layers).train()
    if name == "vit":
        images = torch.randn(BATCH, 4, 32, 32)
        return model, {"pixel_values": images, "labels": torch.randint(0, 64, (BATCH,))}
    words = {key: torch.randint(0, WORDS, (BATCH, SEQ)) for key in ("input_ids", "labels")}
    return model, words


@dataclass(frozen=True)
class Case:
    """A model under a plan, captured and planned once for all ranks."""

    name: str
    layers: int
    plan: Plan
    captured: Captured

    def simulated(self) -> tuple[Task, ...]:
        graph, model = self.captured.graph, AnalyticModel(self.plan.mesh)
        return tasks(graph, self.plan, works(graph, self.plan, table()), model)

    def measured(self) -> Measured:
        model, batch = make(self.name, self.layers)
        with patch.object(compiler, "capture_graph", lambda *_: self.captured):
            program = autopar.compile(
                model,
                self.plan.mesh,
                plan=self.plan,
                example_inputs=batch,
                optimizer=torch.optim.AdamW,
            )
        executor: Any = program._executor
        return measured_step(executor, self.captured.inputs.flatten((), batch))


def cases(name: str, plans: list[str], layers: int) -> list[Case]:
    model, batch = make(name, layers)
    nothing = compiler.Trace(None)
    captured = compiler.capture_graph(model, (), batch, compiler.Options(), nothing)
    made = []
    for plan in plans:
        mesh, pins = PLANS[plan]
        options = compiler.Options(pins=pins)
        chosen = compiler.make_plan(captured.graph, autopar.Mesh.parse(mesh), options, nothing)
        made.append(Case(name, layers, chosen, captured))
    return made


def measure(every: list[Case]) -> list[Measured]:
    return [case.measured() for case in every]


def compare(every: list[Case], within: float) -> None:
    """Peaks and ends of forward, backward and step, and the engine's peak, on every rank."""
    found = run_ranks(measure, every)
    for number, case in enumerate(every):
        made = case.simulated()
        peaks, ends = simulated_levels(made)
        peak = run(made, AnalyticModel(case.plan.mesh)).memory.peak
        for rank in found:
            measured = rank[number]
            assert peak == pytest.approx(measured.peak, rel=within)
            assert peaks == pytest.approx(measured.peaks(), rel=within)
            assert ends == pytest.approx(measured.ends(), rel=within)


# Each model and each plan once; the slow test takes every plan of every model.
QUICK = {"gpt2": ["batch x tensor"], "llama": ["Megatron"], "vit": ["data parallel"]}


def test_predicted_bytes_are_measured_bytes() -> None:
    compare([case for name, plans in QUICK.items() for case in cases(name, plans, 2)], 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_predicted_bytes_are_measured_bytes_under_every_plan(name: str) -> None:
    compare(cases(name, list(PLANS), 6), 0.05)

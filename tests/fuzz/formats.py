"""A valid sample of every kind of file and text that autopar reads, with its reader."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.cli.common.pin_options import read_pins
from autopar.cli.solve import _choices
from autopar.codegen.emit import emit
from autopar.cost.algorithms import Level
from autopar.cost.calibration import Calibration, Exchange, Kernel, Product, Timing
from autopar.cost.collectives import written
from autopar.cost.model import AnalyticModel
from autopar.cost.programs.collective_checker import check_program
from autopar.cost.programs.collective_program import CollectiveProgram
from autopar.cost.programs.execution_checker import check_plan
from autopar.cost.programs.execution_plan import ExecutionPlan
from autopar.cost.programs.execution_writer import execution_plan
from autopar.cost.programs.message_simulation import Flow, simulate_messages
from autopar.cost.work import Gemm
from autopar.intra_op import legal
from autopar.intra_op.contest import format_problem, read_problem
from autopar.intra_op.pins.layout_pins import Pins
from autopar.intra_op.problem import Choices, Edge, Problem
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint, format_graph, parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline_step import Wiring
from autopar.passes.verify import verify
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.runtime.folder import open_settings
from autopar.session.compiled import placement_of
from autopar.stage_plan import StagePlan
from autopar.zoo.construction import build
from autopar.zoo.loading import read_config

MESH = "toy[2TFLOP/s 1GiB 20GB/s]: a=2 @5GB/s 1us, b=2 @20GB/s 100ns"


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: its name with the suffix.
        sample: the text of a good one.
        tree: the same as tables and lists, None where it has no such form.
        read: reads a file and uses what it says, as far as that goes without processes.
    """

    name: str
    sample: str
    tree: Any
    read: Callable[[Path], object]


class Blocks(nn.Module):
    """A few equal blocks; small, so that many plans of it can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x).square().mean()
        return out


def subject() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of all samples in float64, and its batch."""
    torch.manual_seed(0)
    return Blocks().double(), {"x": torch.linspace(-1, 1, 128).reshape(8, 16).double()}


@cache
def graph() -> Graph:
    model, batch = subject()
    return capture_graph(model, (), batch, Options(), Trace(None)).graph


@cache
def a_plan() -> Plan:
    model, batch = subject()
    return autopar.plan(
        model, MESH, example_inputs=batch, recompute="full 2", offload="optimizer", fuse=True,
        pins={"head.weight": "[8, 16] -sum(a, b)"}, state="zero3",
    )  # fmt: skip


@cache
def a_pipeline() -> Plan:
    model, batch = subject()
    return autopar.plan(model, MESH, example_inputs=batch, stages=2, microbatches=4)


def emitted(plan: StagePlan) -> str:
    """The program of a plan for the model of the samples; a named error if it is none of it."""
    plan.check(fingerprint(graph()), {node.name for node in graph().folded}, Mesh.parse(MESH))
    legal.check(graph(), plan, table())
    return emit(graph(), plan, AnalyticModel(plan.mesh).collective)


def _plan(path: Path) -> object:
    plan = Plan.load(path)
    assert Plan.from_toml(plan.to_toml()) == plan
    return (
        placement_of(plan, Wiring.chain(len(plan.stages)))
        if plan.is_pipeline
        else emitted(plan.stage)
    )


def _graph(path: Path) -> object:
    found = verify(parse_graph(path.read_bytes().decode("utf-8", "replace")))
    assert parse_graph(format_graph(found)) == found
    return fingerprint(found)


def _collective(path: Path) -> object:
    program = CollectiveProgram.parse(path.read_bytes().decode("utf-8", "replace"))
    assert CollectiveProgram.parse(str(program)) == program
    check_program(program)
    return simulate_messages(Flow.of(program), [Level(program.ranks, 1e9, 1e-6)], 1e6)


def _execution(path: Path) -> object:
    plan = ExecutionPlan.load(path)
    assert ExecutionPlan.parse(str(plan)) == plan
    return check_plan(plan)


def _mesh(path: Path) -> object:
    mesh = Mesh.parse(path.read_bytes().decode("utf-8", "replace"))
    assert Mesh.parse(str(mesh)) == mesh
    return AnalyticModel(mesh), mesh.coordinate(mesh.size - 1)


def _pins(path: Path) -> object:
    name, _, text = path.read_bytes().decode("utf-8", "replace").partition("=")
    return Pins(graph(), {name: text}), read_pins((), (), (name + "=" + text,), None)


def _problem() -> Problem:
    nodes = tuple(
        Choices(f"n{n}", ("a", "b"), (1.0, 2.0 + n), (3.0, 4.0), (n, n + 2)) for n in range(4)
    )
    edges = tuple(Edge(n, n + 1, torch.ones(2, 2).numpy()) for n in range(3))
    return Problem("p", nodes, edges, 100.0)


def _calibration() -> Calibration:
    time = Timing(1e-5, 0.1)
    return Calibration(
        Mesh.parse("cpu: data=2, tensor=2"), "2.11", "2026-01-01",
        tuple(Product("f32", Gemm(1, m, 8, 8, 0), time) for m in (8, 16)),
        (Kernel("aten.gelu", "f32", 10.0, 20.0, time),),
        (Exchange("all_reduce", ("data", "tensor"), 4096.0, time),),
    )  # fmt: skip


CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2,
    "n_embd": 8, "vocab_size": 16, "n_positions": 8, "dtype": "float32", "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True, "activation_function": "gelu_new",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8, "intermediate_size": 16,
    "vocab_size": 16, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 16, "torch_dtype": "bfloat16",
}  # fmt: skip
SETTINGS = """clip_norm = 1.0
ema = 0.9
[optimizer]
name = "AdamW"
keywords = {lr = 0.01, betas = [0.9, 0.99]}
[tied]
a = "b"
[options."head.weight"]
weight_decay = 0.0
"""


@cache
def formats() -> tuple[Format, ...]:
    plan, pipeline, calibration = a_plan().to_toml(), a_pipeline().to_toml(), _calibration()
    problem = format_problem(_problem())
    measured = calibration.to_toml()

    def configured(path: Path) -> object:
        return build(read_config(path))

    ring = written("all_reduce", "flat_ring", (2, 2))
    collective, execution = str(ring), str(execution_plan(ring))

    return (
        Format("plan.toml", plan, tomllib.loads(plan), _plan),
        Format("pipeline.toml", pipeline, tomllib.loads(pipeline), _plan),
        Format("graph.txt", format_graph(graph()), None, _graph),
        Format("calibration.toml", measured, tomllib.loads(measured), Calibration.load),
        Format("problem.json", problem, json.loads(problem), read_problem),
        Format("solution.json", '{"solution": [0, 1, 1]}', {"solution": [0, 1, 1]}, _choices),
        Format("gpt2.json", json.dumps(CONFIG), CONFIG, configured),
        Format("llama.json", json.dumps(LLAMA), LLAMA, configured),
        Format("program.toml", SETTINGS, tomllib.loads(SETTINGS), open_settings),
        Format("mesh.txt", MESH, None, _mesh),
        Format("collective.txt", collective, None, _collective),
        Format("execution.json", execution, json.loads(execution), _execution),
        Format("pins.txt", "head.weight=[8@a, 16] | [8@a@b, 16] | [8, 16] => [8, 16]", None, _pins),
    )

"""Options of planning: plans keep theirs, and stages can be searched for from Python."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.errors import OptionError
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.executed.execution import Execution
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.update import Update
from autopar.pins import data_parallel
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support import models
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

MESH = Mesh.parse("H100: gpu=2")
# Of every option a value that is not the default, and that a plan can be made under.
OTHERS: dict[str, Any] = {
    "memory": 30e9,
    "unknown_ops": "error",
    "pins": [data_parallel("gpu")],
    "solver": "greedy",
    "recompute": "full 1",
    "microbatches": 2,
    "whole_loss": False,
    "state": "zero1",
    "precision": Precision.read("bf16"),
    "fuse": ("gated",),
    "offload": "optimizer",
    "update": Update.parse(["a b whole -> row[a 1], col[1 b]", "* -> momentum_buffer[*]"]),
    "batches": "local over gpu",
    "expert_load": "zipf 0.5",
    "documents": "512 128",
    "execution": Execution.read("merged loss=steps"),
    "collectives": ChosenAlgorithms.parse(["all_reduce over gpu from 1: halving_doubling"]),
}
WITH: dict[str, dict[str, Any]] = {"whole_loss": {"microbatches": 2}}
# Those that the capture heeds, or a pass over its graph.
OF_GRAPHS = {
    "microbatches", "whole_loss", "precision", "fuse", "update", "expert_load", "documents",
}  # fmt: skip
# A plan cannot say these: functions and files, and how its own stage came to be.
BESIDE = {
    "loss_fn", "trace", "table", "calibration", "whole", "stages", "schedule", "global_batch",
    "allow", "stored",
}  # fmt: skip


def test_every_option_is_kept_by_plans_or_named_beside_them() -> None:
    assert {field.name for field in fields(Options)} == set(OTHERS) | BESIDE


def captured(options: Options) -> Graph:
    model, batch = models.llama()
    return capture_graph(model, (), batch, options, Trace(None)).graph


@pytest.fixture(scope="module")
def plain() -> Graph:
    return captured(Options())


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_says_the_options_that_it_was_made_under(name: str, plain: Graph) -> None:
    """From the plan's file alone the same search follows: equal options, and an equal plan."""
    options = replace(Options(), **{name: OTHERS[name]}, **WITH.get(name, {}))
    graph = captured(options) if name in OF_GRAPHS else plain
    plan = make_plan(graph, MESH, options, Trace(None))
    loaded = Plan.from_toml(Plan.of(plan).to_toml()).stage
    again = Options.like(loaded)
    if name == "pins":  # those of the literature stand in a plan as the layouts that they mean
        assert again.pins == plan.pins != {}
    elif name == "state":
        assert str(again.state) == str(options.state)
    else:
        assert getattr(again, name) == getattr(options, name)
    made = make_plan(graph, MESH, again, Trace(None))
    assert made.nodes == plan.nodes
    assert made.predicted == plan.predicted


def test_options_are_made_in_two_places() -> None:
    """Whoever rebuilt them field by field would forget the next one that there is."""
    found = []
    for path in Path(autopar.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if "Options(" in text else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Options" and node.keywords:
                found.append(f"{path.parent.name}/{path.name}")
    assert found == ["session/keywords.py"]


# The search for stages ----------------------------------------------------------------------------

CLUSTER = "H100: gpu=2"
SOURCE = """
from tests.support.models import gpt2

def tiny(batch=8):
    return gpt2(2, batch=batch)
"""


@pytest.fixture(scope="module")
def searched() -> Plan:
    model, batch = models.gpt2(2)
    return autopar.plan(model, CLUSTER, example_inputs=batch, stages="auto", global_batch=4)


def test_python_and_the_command_line_search_alike(searched: Plan, tmp_path: Path) -> None:
    source, file = tmp_path / "model.py", tmp_path / "plan.toml"
    source.write_text(SOURCE)
    command = ["plan", f"{source}:tiny", "--mesh", CLUSTER, "--global-batch", "4", "-o", str(file)]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert replace(Plan.load(file), model=searched.model) == searched


def test_no_plan_of_the_batch_in_equal_stages_is_faster(searched: Plan) -> None:
    model, batch = models.gpt2(2, batch=4)
    for stages, microbatches in ((2, 2), (2, 4)):
        plan = autopar.plan(
            model, CLUSTER, example_inputs=batch, stages=stages, microbatches=microbatches
        )
        assert searched.predicted.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stages": "auto", "microbatches": 4}, "also chooses microbatches"),
        ({"stages": "auto", "schedule": "gpipe"}, "also chooses microbatches"),
        ({"stages": "auto", "offload": "activations"}, "does not support offload"),
        ({"stages": 2, "global_batch": 16}, 'needs stages="auto"'),
        ({"stages": "many"}, "stages"),
        ({"stages": "auto", "global_batch": 0}, "global_batch"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], says: str) -> None:
    model, batch = models.gpt2(1)
    with pytest.raises(OptionError, match=says):
        autopar.plan(model, CLUSTER, example_inputs=batch, **options)


def perceptron() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = models.mlp((64, 256, 256, 64), batch=16)
    return model.double(), {"x": batch["x"].double()}


def train() -> tuple[list[float], bool]:
    """Losses of a program whose stages were searched for on this mesh."""
    model, batch = perceptron()
    program = autopar.compile(
        model,
        "cpu[1GFLOP/s 64GiB 1GB/s]: x=2 @1MB/s 1ms",  # so slow that only activations are sent
        loss_fn=models.squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example_inputs=batch,
        stages="auto",
    )
    return [program.step(**batch).item() for _ in range(3)], program.plan.is_pipeline


def test_a_program_trains_in_the_stages_that_were_found() -> None:
    model, batch = perceptron()
    updates = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train_plainly(lambda: models.squared_error(model(**batch), **batch), updates, 3)
    for found, staged in run_ranks(train, count=2):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        assert staged

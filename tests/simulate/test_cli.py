"""`autopar simulate` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.plan import Plan
from autopar.simulate.task import COMPUTE
from tests.cli.test_commands import refused, run

MESH = "A100-80: node=2, gpu=4"
MODEL = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x).square().mean()

def model():
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return Head(nn.Sequential(*layers)), {"x": torch.zeros(16384, 1024)}

def two():
    return nn.Linear(1024, 1024), {"input": torch.zeros(16384, 1024)}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture(scope="module")
def plan(source: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    words = ("--pins", "data_parallel")
    run("plan", f"{source}:model", "--mesh", MESH, *words, "-o", path)
    return path


def test_figures_and_pictures(plan: Path, source: str, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    flags = ("--model", f"{source}:model", "--trace-json", trace)
    shown = run("simulate", plan, *flags).stdout
    for word in ("Simulated, not measured", "exposed communication", "all_reduce"):
        assert word in shown
    assert {"compute", "memory", "network"} <= {line.split(" ")[0] for line in shown.splitlines()}
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {COMPUTE, "network: node,gpu"}


def test_json_agrees_with_itself_and_waiting_takes_longer(plan: Path, source: str) -> None:
    flags = ("--model", f"{source}:model", "--json")
    beside, waits = (
        json.loads(run("simulate", plan, *flags, *more).stdout) for more in ((), ("--wait",))
    )
    for found in (beside, waits):
        assert found["simulated"] is True
        assert sum(found["phases"].values()) == pytest.approx(found["step_seconds"])
        assert sum(found["memory_by_kind"].values()) == pytest.approx(found["peak_bytes"])
        for view in found["communication"].values():
            exposed = sum(item["exposed_seconds"] for item in view.values())
            assert exposed == pytest.approx(found["exposed_seconds"])
        # Nothing is computed twice, but the batch splits evenly: both are the same.
        model, hardware = (found[f"{word}_flops_utilisation"] for word in ("model", "hardware"))
        assert 0 < model == pytest.approx(hardware)
    assert Plan.load(plan).predicted.seconds == pytest.approx(beside["step_seconds"], rel=1e-9)
    assert beside["step_seconds"] < waits["step_seconds"]
    assert waits["step_seconds"] == pytest.approx(
        waits["compute_seconds"] + waits["exposed_seconds"]
    )


def test_what_cannot_be_simulated_is_refused_by_name(plan: Path, source: str) -> None:
    refused("simulate", "no.toml", says="no.toml")
    refused("simulate", plan, says="--model")
    refused("simulate", plan, "--model", f"{source}:two", says="another model")
    other = plan.parent / "two.toml"
    run("plan", f"{source}:two", "--mesh", MESH, "-o", other)
    refused("simulate", other, "--model", f"{source}:two", says="no training step")
    where = ("--model", f"{source}:model", "--trace-json", plan.parent / "no" / "x.json")
    refused("simulate", plan, *where, says="cannot write")


def test_a_slow_host_makes_a_step_longer_and_a_graph_does_not(plan: Path, source: str) -> None:
    def seconds(*words: str) -> float:
        shown = run("simulate", plan, "--model", f"{source}:model", "--json", *words).stdout
        return float(json.loads(shown)["step_seconds"])

    plain = seconds()
    assert seconds("--host", "graph") == pytest.approx(plain, rel=1e-3)
    assert plain <= seconds("--host", "eager") < seconds("--host", "modules")

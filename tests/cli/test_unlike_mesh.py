"""Every command that reads a plan, on a pipeline whose stages are on unlike devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.plan import Plan
from tests.cli.test_commands import LLAMA, run

pytestmark = pytest.mark.slow
CLUSTER = "H100: gpu=2 + A100-80: gpu=2"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a small Llama, whose model is data."""
    folder = tmp_path_factory.mktemp("unlike")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model = f"hf:{folder / 'config.json'}"
    given = ("--mesh", CLUSTER, "--global-batch", 16, "--seq", 16)
    run("plan", model, *given, "-o", folder / "plan.toml")
    return folder / "plan.toml"


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_the_step_is_that_of_the_plan(path: Path, command: str, tmp_path: Path) -> None:
    plan, trace = Plan.load(path), tmp_path / "trace.json"
    shown = json.loads(run(command, path, "--json", "--trace-json", trace).stdout)
    assert shown["step_seconds"] == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert len(shown["stages"]) == len(plan.stages)
    assert json.loads(trace.read_text())["traceEvents"]


def test_each_stage_is_explained_on_its_own_device(path: Path) -> None:
    plan = Plan.load(path)
    assert {stage.mesh.device for stage in plan.stages} == {"H100", "A100-80"}
    for number, stage in enumerate(plan.stages):
        shown = json.loads(run("explain", path, "--stage", number, "--json").stdout)
        step = sum(shown["seconds"].values()) - shown["hidden"]
        assert step == pytest.approx(stage.predicted.step_seconds, rel=1e-6)
        assert shown["peak"] == pytest.approx(stage.predicted.peak_bytes, rel=1e-6)


def test_alternatives_are_priced_on_the_device_of_their_stage(path: Path) -> None:
    name = "lm_head.weight"
    (shown,) = json.loads(run("why", path, name, "-n", 1, "--json").stdout)
    assert shown["name"] == name
    assert len(shown["others"]) == 1
    whole = json.loads(run("why-not", path, name, "[128, 64]", "--json").stdout)
    assert whole["layouts"].startswith("[128, 64]")


def test_report_diff_and_emit(path: Path, tmp_path: Path) -> None:
    run("report", path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(device in page for device in ("H100", "A100-80"))
    run("diff", path, path)
    run("emit", path, "-o", tmp_path / "program")
    stages = len(Plan.load(path).stages)
    assert len(list((tmp_path / "program").glob("stage_*.py"))) == stages

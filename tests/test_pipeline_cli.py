"""`autopar plan --global-batch` on a small cluster, and what other commands make of its plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.codegen.load import load
from autopar.inter_op.schedules import schedule
from autopar.pipeline_plan import PipelinePlan
from tests.models import gpt2

MODEL = ["plan", "gpt2", "--layers", "3", "--seq", "64", "--mesh", "H100: node=2, gpu=2"]
TINY = """
from tests.models import gpt2

def tiny(batch=8):
    return gpt2(2, batch=batch)
"""


def test_stages_are_chosen_and_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    command = [*MODEL, "--global-batch", "8", "--json", "-o", str(file)]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    made = PipelinePlan.load(file)
    assert made.microbatches == told["microbatches"]
    assert made.schedule == told["schedule"]
    assert len(made.stages) == sum(len(stage["layers"]) for stage in told["stages"])
    ranks = {rank for stage in made.stages for rank in stage.ranks()}
    assert ranks == set(range(4))
    assert made.predicted == told["predicted"]
    assert all(other["step_seconds"] >= told["searched_seconds"] for other in told["others"])


def test_what_fits_nowhere_is_refused() -> None:
    command = [*MODEL, "--global-batch", "8", "--memory", "1MiB"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 2
    assert "MiB" in result.output or "GiB" in result.output


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A plan of two stages on two devices each, and the model that it is for."""
    folder = tmp_path_factory.mktemp("staged")
    (folder / "model.py").write_text(TINY)
    model, batch = gpt2(2, batch=8)
    plan = autopar.plan(
        model, "H100: node=2, gpu=2", example_inputs=batch, stages=2, microbatches=4
    )
    assert isinstance(plan, PipelinePlan)
    plan.save(folder / "plan.toml")
    return [str(folder / "plan.toml"), "--model", f"{folder / 'model.py'}:tiny"]


def told(command: str, *arguments: str, code: int = 0) -> str:
    """What a command prints, errors included."""
    result = CliRunner().invoke(main, [command, *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_a_pipeline_is_explained(staged: list[str]) -> None:
    text = told("explain", *staged)
    assert "1f1b, 4 microbatches, 2 stages" in text
    for ranks in ("0-1", "2-3"):
        assert re.search(rf"^ranks {ranks} .*F0", text, re.MULTILINE)
    figures = json.loads(told("explain", *staged, "--json"))
    assert figures["step_seconds"] > sum(
        stage["forward"] + stage["backward"] for stage in figures["stages"]
    )
    # One stage alone is explained as a whole model is.
    part = json.loads(told("explain", *staged, "--stage", "1", "--json"))
    assert part["parameters"]


def test_the_simulated_trace_holds_every_action(staged: list[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    told("simulate", *staged, "--trace-json", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    rows = {
        start: set(map(str, row))
        for start, row in zip((0, 2), schedule("1f1b", 2, 4).rows, strict=True)
    }
    found = {
        rank: {e["name"] for e in events if e.get("cat") == "action" and e["pid"] == rank}
        for rank in rows
    }
    assert found == rows
    sent = sorted(e["name"] for e in events if e.get("cat") == "communication")
    assert sent == sorted(f"SEND_{way}.{n}" for way in ("F0", "B1") for n in range(4))
    ends = {e["name"]: e["ts"] + e["dur"] for e in events if e["ph"] == "X"}
    starts = {e["name"]: e["ts"] for e in events if e["ph"] == "X"}
    # A microbatch is sent when it is computed, and computed on when it has come.
    assert all(
        ends[f"F0.{n}"] <= starts[f"SEND_F0.{n}"] + 1e-6
        and ends[f"SEND_F0.{n}"] <= starts[f"F1.{n}"] + 1e-6
        for n in range(4)
    )


def test_a_pipeline_is_emitted(staged: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    told("emit", *staged, "-o", str(folder))
    names = {file.name for file in folder.iterdir()}
    assert names == {
        "program.py", "plan.toml", "graph.txt", "program.toml", "stage_0.py", "stage_1.py"
    }  # fmt: skip
    assert PipelinePlan.load(folder / "plan.toml") == PipelinePlan.load(staged[0])
    loaded = load((folder / "stage_1.py").read_text(), "stage_1.py")
    assert loaded.LOSS is not None


@pytest.mark.parametrize(
    "command",
    [["why", "{}", "lm_head.weight"], ["diff", "{}", "{}"], ["plan", *MODEL[1:], "--from", "{}"]],
)
def test_commands_for_one_program_name_a_pipeline(staged: list[str], command: list[str]) -> None:
    text = told(*(word.format(staged[0]) for word in command), code=2)
    assert "the plan is one of a pipeline" in text


def test_what_a_pipeline_has_not_is_refused(staged: list[str]) -> None:
    assert "--stage names" in told("explain", *staged, "--by", "layer", code=2)
    assert "there is no stage 2" in told("explain", *staged, "--stage", "2", code=2)
    assert "does not divide" in told("explain", *staged, "--batch", "6", code=2)

"""`autopar plan --global-batch` on a small cluster, and other commands on its plans."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.inter_op.schedules import schedule
from autopar.ir.offload import Offload
from autopar.plan import Plan
from autopar.runtime.module_loader import load
from tests.support.models import gpt2

MODEL = ["plan", "gpt2", "--layers", "2", "--seq", "64", "--mesh", "H100: node=2, gpu=2"]
TINY = """
from tests.support.models import gpt2

def tiny(batch=8):
    return gpt2(2, batch=batch)
"""


def test_stages_are_chosen_and_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    command = [*MODEL, "--stages", "auto", "--batch", "8", "--json", "-o", str(file)]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    made = Plan.load(file)
    assert made.microbatches == told["microbatches"]
    assert made.schedule == told["schedule"]
    assert len(made.stages) == sum(len(stage["layers"]) for stage in told["stages"])
    ranks = {rank for stage in made.stages for rank in stage.ranks()}
    assert ranks == set(range(4))
    assert made.predicted.figures() == told["predicted"]
    assert all(other["step_seconds"] >= told["searched_seconds"] for other in told["others"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--stages", "auto"), "pass --batch"),
        (("--stages", "2", "--global-batch", "8"), "pass --batch with --stages 2"),
        (("--stages", "many"), "is not a valid integer"),
    ],
)
def test_stages_that_contradict_other_options_are_refused(
    options: tuple[str, ...], says: str
) -> None:
    assert says in " ".join(told("plan", *MODEL[1:], *options, code=2).split())


def test_what_fits_nowhere_is_refused() -> None:
    command = [*MODEL, "--global-batch", "8", "--memory", "1MiB"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 2
    assert "MiB" in result.output or "GiB" in result.output


def test_activations_of_stages_do_not_go_to_the_host() -> None:
    command = [*MODEL, "--global-batch", "8", "--offload", "activations"]
    refused = CliRunner().invoke(main, command, catch_exceptions=False)
    assert refused.exit_code == 2
    assert 'offload="optimizer"' in refused.output


@pytest.mark.slow
def test_optimizer_state_of_stages_goes_to_the_host(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    command = [*MODEL, "--global-batch", "8", "-o", str(file), "--offload"]
    found = CliRunner().invoke(main, [*command, "optimizer"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert all(stage.offload == Offload(optimizer=True) for stage in Plan.load(file).stages)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A plan of two stages on two devices each, and the model that it is for."""
    folder = tmp_path_factory.mktemp("staged")
    (folder / "model.py").write_text(TINY)
    model, batch = gpt2(2, batch=8)
    plan = autopar.plan(
        model, "H100: node=2, gpu=2", example_inputs=batch, stages=2, microbatches=4
    )
    assert isinstance(plan, Plan)
    plan.save(folder / "plan.toml")
    return [str(folder / "plan.toml"), "--model", f"{folder / 'model.py'}:tiny"]


def told(command: str, *arguments: str, code: int = 0) -> str:
    """Returns the output of a command, errors included."""
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
    assert Plan.load(folder / "plan.toml") == Plan.load(staged[0])
    loaded = load((folder / "stage_1.py").read_text(), "stage_1.py")
    assert loaded.LOSS is not None


def test_a_choice_of_a_stage_is_made_again(staged: list[str]) -> None:
    file, *model = staged
    name = "transformer.h.1.mlp.c_fc.weight"
    stage = Plan.load(file).stages[1]
    (found,) = json.loads(told("why", file, name, *model, "--json"))
    # Its figures are the stage's own, and no other choice is better.
    figures = {f["name"]: f for f in found["others"][0]["difference"]["figures"]}
    step = figures["step_seconds"]
    assert step["before"] == pytest.approx(stage.predicted.step_seconds, rel=1e-6)
    assert step["after"] >= step["before"] * (1 - 1e-3)
    # Asked for what is there already, the stage is planned as it was.
    same = json.loads(told("why-not", file, name, found["layout"], *model, "--json"))
    after = {f["name"]: f["after"] for f in same["difference"]["figures"]}
    assert after["step_seconds"] == pytest.approx(step["before"], rel=1e-3)
    assert same["fits"]


def test_a_name_of_several_stages_or_of_none_is_refused(staged: list[str]) -> None:
    file, *model = staged
    text = told("why", file, "transformer.h.*.mlp.c_fc.weight", *model, code=2)
    assert "is in 2 stages" in text
    assert "--stage N" in text
    assert "did you mean" in told("why", file, "transformer.h.1.mlp.c_fx.weight", *model, code=2)


def test_an_explained_stage_has_the_figures_of_its_plan(staged: list[str]) -> None:
    text = told("explain", *staged, "--stage", "0")
    assert "The plan itself predicts" not in text


def test_pipelines_are_compared(staged: list[str], tmp_path: Path) -> None:
    file = Path(staged[0])
    assert told("diff", str(file), str(file)) == ""
    made = Plan.load(file)
    first, last = made.stages
    pinned = replace(last, pins={"lm_head.weight": "[96@gpu, 32]"})
    other = replace(made, schedule="gpipe", stages=(first, pinned))
    other.save(tmp_path / "other.toml")
    text = told("diff", str(file), str(tmp_path / "other.toml"), code=1)
    assert re.search(r"schedule +1f1b +gpipe", text)
    found = json.loads(told("diff", str(file), str(tmp_path / "other.toml"), "--json", code=1))
    assert found["head"] == {"schedule": ["1f1b", "gpipe"]}
    (stage,) = found["stages"]
    assert stage["stages"] == [1]
    assert stage["difference"]["pins"] == {"lm_head.weight": ["", "[96@gpu, 32]"]}


def test_a_pipeline_is_compared_with_a_plan_in_one_piece(staged: list[str], tmp_path: Path) -> None:
    Plan.of(replace(Plan.load(staged[0]).stages[0], end="")).save(tmp_path / "stage.toml")
    text = told("diff", staged[0], str(tmp_path / "stage.toml"), code=1)
    assert re.search(r"schedule +1f1b +none", text)
    assert re.search(r"bubble +[0-9.]+% +0.0%", text)


def test_a_pipeline_is_no_plan_to_start_from(staged: list[str]) -> None:
    text = told("plan", *MODEL[1:], "--from", staged[0], code=2)
    assert "this one is a pipeline" in text


def test_what_a_pipeline_has_not_is_refused(staged: list[str]) -> None:
    assert "need --stage" in told("explain", *staged, "--by", "layer", code=2)
    assert "there is no stage 2" in told("explain", *staged, "--stage", "2", code=2)
    assert "does not divide" in told("explain", *staged, "--batch", "6", code=2)

"""`autopar plan --global-batch` on a small cluster."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from autopar.cli import main
from autopar.pipeline_plan import PipelinePlan

MODEL = ["plan", "gpt2", "--layers", "3", "--seq", "64", "--mesh", "H100: node=2, gpu=2"]


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
    assert made.predicted["step_seconds"] == told["step_seconds"] > 0
    assert all(other["step_seconds"] >= told["step_seconds"] for other in told["others"])


def test_what_fits_nowhere_is_refused() -> None:
    command = [*MODEL, "--global-batch", "8", "--memory", "1MiB"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 2
    assert "MiB" in result.output or "GiB" in result.output

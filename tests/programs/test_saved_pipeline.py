"""`compile` with stages on four ranks, from the model to a saved folder that trains by itself."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import autopar
from autopar.plan import Plan
from tests.programs.test_saved_program import FILES, run
from tests.support.models import gpt2
from tests.support.ranks import run_ranks

MESH = "toy[1GFLOP/s 64GiB 1GB/s]: stage=2 @10GB/s 1us, tensor=2 @10GB/s 1us"


def train_and_save(path: str) -> tuple[list[str], Plan | autopar.Plan]:
    """Losses of steps after saving, as the saved program prints them, and the plan."""
    torch.manual_seed(0)
    model, batch = gpt2()
    model = model.double()
    program = autopar.compile(
        model,
        MESH,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.9)),
        clip_norm=0.5,
        stages=4,
        microbatches=4,
        schedule="interleaved_1f1b chunks=2",
    )
    # Evaluation before training is the model's own.
    found = program(**batch)
    with torch.no_grad():
        wanted = model(**batch)
    assert_close(found.logits, wanted.logits)
    assert_close(found.loss, wanted.loss)  # every microbatch has as many tokens
    program.step(**batch)
    # A state_dict is that of the model, and can be taken back.
    before = program.state_dict()
    assert before.keys() == model.state_dict().keys()
    first = program.step(**batch)
    program.load_state_dict(before)
    assert all(torch.equal(program.state_dict()[k], v) for k, v in before.items())
    assert_close(program(**batch).loss, first)
    program.save(path)
    # The saved program begins with a fresh optimizer.
    again = autopar.compile(
        model,
        MESH,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.9)),
        clip_norm=0.5,
        plan=program.plan,
        example_inputs=batch,
    )
    again.load_state_dict(before)
    return [f"{again.step(**batch).item():.6f}" for _ in range(10)], again.plan


@pytest.mark.slow
def test_a_saved_pipeline_trains_by_itself(tmp_path: Path) -> None:
    target = tmp_path / "out" / "pipeline"
    results = run_ranks(train_and_save, str(target))
    losses, plan = results[0]
    assert all(result == results[0] for result in results)
    stages = {f"stage_{number}.py" for number in range(4)}
    assert {file.name for file in target.iterdir()} == FILES | stages
    assert Plan.load(target / "plan.toml") == plan
    source = (target / "program.py").read_text()
    assert re.search(r"^# 0-1  F0-F1-F0", source, re.MULTILINE)
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--line-length",
        "110",
        str(target),
    ]
    checked = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    printed = run(sys.executable, *launch, str(target / "program.py"))
    steps = [line.split() for line in printed.splitlines() if line.startswith("step")]
    assert [step[3] for step in steps] == losses

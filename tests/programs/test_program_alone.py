"""autopar.compile in one process, against the unsharded model."""

from __future__ import annotations

import copy
import functools
import itertools
import traceback
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import PlanMismatchError, ProgramError
from tests.programs.test_program import SINGLE, Nested, close, regression, train_alone
from tests.support.models import Mlp, gpt2


def test_nothing_is_there_before_the_first_batch(tmp_path: Path) -> None:
    model, batches = regression()
    program = autopar.compile(model, SINGLE)
    for ask in ("plan", "source", "graph", "optimizer", "grad_norm"):
        with pytest.raises(ProgramError, match="not compiled yet"):
            getattr(program, ask)
    for call in (program.state_dict, functools.partial(program.save, tmp_path / "program")):
        with pytest.raises(ProgramError, match="not compiled yet"):
            call()
    assert not list(tmp_path.iterdir())
    program.step(**batches[0])
    assert str(program.plan.mesh) == SINGLE
    assert "def forward" in program.source


def test_a_plan_needs_no_processes_and_fits_only_its_model() -> None:
    model, batches = regression()
    plan = autopar.plan(model, SINGLE, example_inputs=batches[0])
    assert autopar.Plan.from_toml(plan.to_toml()) == plan
    program = autopar.compile(model, SINGLE, plan=plan, example_inputs=batches[0])
    assert program.plan == plan
    other = autopar.compile(Nested().double(), SINGLE, plan=plan)
    batch = {"x": batches[0]["x"], "rest": (batches[0]["target"], [batches[0]["target"]])}
    with pytest.raises(PlanMismatchError, match="another model"):
        other.step(batch)


def test_an_error_in_the_program_shows_the_generated_line() -> None:
    model, batch = gpt2()
    program = autopar.compile(model, SINGLE, example_inputs=batch)
    other, bigger = gpt2(batch=4)
    autopar.compile(other, SINGLE, example_inputs=bigger)  # of the same name, with other lines
    with pytest.raises(IndexError) as caught:
        program.step(**{**batch, "input_ids": batch["input_ids"] + 1000})
    frames = [f for f in traceback.extract_tb(caught.value.__traceback__) if "<autopar" in f[0]]
    (frame,) = frames
    assert frame.name == "forward"
    assert frame.line is not None
    assert "F.embedding(" in frame.line
    assert frame.line == program.source.splitlines()[(frame.lineno or 0) - 1].strip()


def test_a_program_without_a_loss_computes_but_does_not_train() -> None:
    model = Mlp((16, 8))
    program, x = autopar.compile(model, SINGLE), torch.randn(4, 16)
    torch.testing.assert_close(program(x), model(x).detach())
    with pytest.raises(ProgramError, match="no loss"):
        program.step(x)


def test_schedulers_drive_the_optimizer() -> None:
    model, batches = regression()
    alone = copy.deepcopy(model)
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    program = autopar.compile(model, SINGLE, optimizer=sgd, example_inputs=batches[0])
    theirs = sgd(alone.parameters())
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        for optimizer in (program.optimizer, theirs)
    ]
    for batch in itertools.islice(itertools.cycle(batches), 4):
        losses, _ = train_alone(alone, theirs, [batch])
        close(program.step(**batch), losses[0])
        for schedule in schedules:
            schedule.step()

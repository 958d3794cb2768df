"""Scaler, average, groups and schedulers of pipelines, against plain torch on one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.precision import Precision
from tests.support.mixed import ADAMW, GROUPS, MESH, Net, error, judge, net, no_decay
from tests.support.ranks import run_ranks

STEPS, MICROBATCHES, BROKEN = 5, 4, 2
WAYS = [("1f1b", "zero1", "none"), ("zb_h1", "ddp", "none"), ("1f1b", "zero2", "optimizer")]


class Exact(Net):
    """The same without the conversion of the logits to float32."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        logits = self.head(self.norm(x) + self.shift)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def exact() -> tuple[nn.Module, dict[str, Tensor]]:
    """It in float64, with its batch; the same at every call."""
    _, batch = net()
    torch.manual_seed(0)
    return Exact().double(), batch


def made(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]] = net, **how: Any
) -> tuple[Any, dict[str, Tensor]]:
    """A program in two stages on two devices each, and a batch; both stages hold the embedding."""
    model, batch = make()
    how = {"stages": 2, "microbatches": MICROBATCHES, "optimizer": ADAMW, **how}
    return autopar.compile(model, MESH, example_inputs=batch, **how), batch


# Groups, averages, schedules, checkpoints ---------------------------------------------------------


@dataclass
class Tuned:
    """What a run leaves: losses, parameters, averages and learning rates."""

    losses: list[float]
    state: dict[str, Tensor]
    average: dict[str, Tensor]
    rates: list[float]


def tuned(folder: str) -> list[Tuned]:
    """Each way two steps, then one by a program in one piece that goes on from its checkpoint."""
    found = []
    for number, (schedule, state, offload) in enumerate(WAYS):
        how: dict[str, Any] = {"groups": autopar.groups(GROUPS), "ema": 0.9}
        how |= {"offload": offload, "state": state}
        program, batch = made(exact, schedule=schedule, **how)
        rates = torch.optim.lr_scheduler.LinearLR(program.optimizer, 0.5, total_iters=3)
        losses = []
        for _ in range(2):
            losses.append(program.step(**batch).item())
            rates.step()
        program.save_checkpoint(f"{folder}/{number}", scheduler=rates)
        resumed, batch = made(exact, stages=1, microbatches=1, **how)
        rates = torch.optim.lr_scheduler.LinearLR(resumed.optimizer, 0.5, total_iters=3)
        resumed.load_checkpoint(f"{folder}/{number}", scheduler=rates)
        losses.append(resumed.step(**batch).item())
        rates.step()
        after = [group["lr"] for group in resumed.optimizer.param_groups]
        found.append(Tuned(losses, resumed.state_dict(), resumed.ema_state_dict(), after))
    return found


@pytest.mark.slow
def test_groups_averages_and_schedules_of_stages_are_those_of_one_device() -> None:
    model, batch = exact()
    wanted = judge(
        model, batch, Precision(), ADAMW, 3, MICROBATCHES, ema=0.9, groups=no_decay, scheduled=True
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(tuned, folder)
    for found in (way for rank in ranks for way in rank):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-9)
        assert error(found.state, wanted.state) < 1e-9
        assert error(found.average, wanted.average) < 1e-9
        assert found.rates == pytest.approx([1e-2, 3e-2])


# The scaler ---------------------------------------------------------------------------------------


@dataclass
class Scaled:
    """After a step: the scale, whether it was left out, its loss, and the parameters."""

    scale: float
    skipped: bool
    loss: float
    state: dict[str, Tensor]


def scaled(schedule: str) -> list[Scaled]:
    """Steps in fp16, in one of which a gradient of one rank of the last stage overflows."""
    program, batch = made(precision="fp16", schedule=schedule)
    program.scaler.interval = 2
    found = []
    stages = program._executor.stages.values()
    mine = [s.runtime.gradients for s in stages if s.number == 1]
    takes = [gradients.take for gradients in mine]
    for step in range(STEPS):
        for gradients, take in zip(mine, takes, strict=True):
            broken = step == BROKEN and torch.distributed.get_rank() == 3
            gradients.take = (lambda w, g, t=take: t(w, g * torch.inf)) if broken else take
        loss = program.step(**batch).item()
        scaler = program.scaler
        found.append(Scaled(scaler.scale, scaler.skipped, loss, program.state_dict()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_all_stages_leave_out_a_step_whose_gradients_overflow_in_one(schedule: str) -> None:
    ranks = run_ranks(scaled, schedule)
    # What torch's own scaler does, of the same gradients.
    torchs: Any = torch.amp.GradScaler("cpu", growth_interval=2)
    for step in range(STEPS):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        torchs.scale(weight.sum()).backward()
        weight.grad = torch.full_like(weight, torch.inf if step == BROKEN else 1.0)
        torchs.step(optimizer)
        torchs.update()
        for rank in ranks:
            assert rank[step].scale == torchs.get_scale()
            assert rank[step].skipped == (weight.item() == 0.0) == (step == BROKEN)
            same = [
                torch.equal(v, rank[step - 1].state[k]) for k, v in rank[step].state.items() if step
            ]
            assert all(same) if step == BROKEN else not step or not all(same)
    # Without the step that is left out it is the run of one device.
    model, batch = net()
    wanted = judge(model, batch, Precision("f16"), steps=STEPS - 1, microbatches=MICROBATCHES)
    for rank in ranks:
        losses = [found.loss for step, found in enumerate(rank) if step != BROKEN]
        assert losses == pytest.approx(wanted.losses, rel=5e-3)
        assert error(rank[-1].state, wanted.state) < 0.02

"""Mixed precision, groups, averages and frozen weights on four ranks, against plain torch."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.ir.precision import Precision
from tests.support.mixed import (
    ADAMW,
    GROUPS,
    MESH,
    PAIR,
    Batch,
    Judged,
    error,
    judge,
    net,
    no_decay,
    used_whole,
)
from tests.support.ranks import run_ranks

EXACT = Precision("f32", master="f64", communication="f64")
SLOWLY = partial(torch.optim.SGD, lr=1e-9)  # of weights of 1: a float32 would not move
STEPS = 3


def made(dtype: torch.dtype = torch.float32, adapted: bool = False, **how: Any) -> Any:
    """A program of data parallelism over all ranks, and a batch."""
    model, batch = net(dtype, adapted)
    mesh = MESH if torch.distributed.get_world_size() == 4 else PAIR
    how = {"optimizer": ADAMW, "pins": [used_whole], **how}
    return autopar.compile(model, mesh, example_inputs=batch, **how), batch


def run(program: Any, batch: Batch, steps: int = STEPS) -> Judged:
    losses = [program.step(**batch).item() for _ in range(steps)]
    return Judged(losses, program.state_dict())


# The masters --------------------------------------------------------------------------------------


def masters(state: str, microbatches: int, **more: Any) -> dict[str, Tensor]:
    how = {"precision": EXACT, "state": state, "microbatches": microbatches, **more}
    program, batch = made(torch.float64, optimizer=SLOWLY, **how)
    return run(program, batch).state


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Updates, in units in which they are about 1; buffers have none."""
    return {k: (after[k] - v) * 1e9 for k, v in before.items() if k != "shift"}


def check_masters(found: dict[str, Tensor], microbatches: int) -> None:
    model, batch = net(torch.float64)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wanted = judge(model, batch, EXACT, SLOWLY, STEPS, microbatches).state
    assert error(moved(before, found), moved(before, wanted)) < 1e-5


def kept_away(state: str) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Parameters after a run with masters on the device and with masters in host memory, and the
    bytes that the latter have left on the device of each."""
    found = []
    for offload in ("none", "optimizer"):
        program, batch = made(precision="bf16", state=state, offload=offload, clip_norm=0.5)
        found.append(run(program, batch).state)
    weights = program._executor.weights
    assert len(weights.masters) == sum(weight.has_master for weight in weights.all) > 0
    updated = (weight.updated for weight in weights.all if weight.has_master)
    return found, [tensor.untyped_storage().nbytes() for tensor in updated]


@pytest.mark.parametrize("state", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_masters_in_host_memory_leave_the_device_and_change_no_bit(state: str) -> None:
    for (here, away), left in run_ranks(kept_away, state, count=2):
        assert all(torch.equal(value, away[name]) for name, value in here.items())
        assert max(left) == 4  # one element


# Bad gradients ------------------------------------------------------------------------------------


def overflowing(**how: Any) -> list[tuple[float, bool, float, dict[str, Tensor]]]:
    """After each step the scale, whether it was skipped, an lr and the parameters.

    In the third step one element of one gradient is infinite on one rank.
    """
    program, batch = made(precision="fp16", state="zero3", optimizer=ADAMW, **how)
    program.scaler.interval = 2
    found = []
    take = program._executor.gradients.take
    rank = torch.distributed.get_rank()

    def broken(weight: Any, gradient: Tensor) -> None:
        take(weight, gradient.index_fill(0, torch.tensor([0], device=gradient.device), torch.inf))

    for step in range(5):
        program._executor.gradients.take = broken if step == 2 and rank == 1 else take
        program.step(**batch)
        scaler = program.scaler
        found.append((scaler.scale, scaler.skipped, scaler.good, program.state_dict()))
    return found


def check_overflow(ranks: list[list[tuple[float, bool, float, dict[str, Tensor]]]]) -> None:
    first = ranks[0]
    for other in ranks[1:]:
        assert [step[:3] for step in other] == [step[:3] for step in first]
    # What torch's own scaler does, of the same gradients.
    torchs: Any = torch.amp.GradScaler("cpu", growth_interval=2)
    for step, (scale, skipped, _, _) in enumerate(first):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        torchs.scale(weight.sum()).backward()
        weight.grad = torch.full_like(weight, torch.inf if step == 2 else 1.0)
        torchs.step(optimizer)
        torchs.update()
        assert scale == torchs.get_scale()
        assert skipped == (weight.item() == 0.0) == (step == 2)
    for rank in ranks:
        for name, value in rank[2][3].items():
            assert torch.equal(value, rank[1][3][name])  # left out
        assert any(not torch.equal(v, rank[2][3][k]) for k, v in rank[3][3].items())
    model, batch = net()
    wanted = judge(model, batch, Precision("f16"), steps=2).state
    assert error(first[1][3], wanted) < 0.02


# Groups, averages, schedules, adapters, checkpoints -----------------------------------------------


def tuned(folder: str, **more: Any) -> dict[str, Any]:
    """A run, of which `more` may be said, and one under another plan that goes on from it."""
    how = {"adapted": True, "groups": autopar.groups(GROUPS), "ema": 0.9}
    program, batch = made(torch.float64, state="zero3", **how, **more)
    schedule = torch.optim.lr_scheduler.LinearLR(program.optimizer, 0.5, total_iters=3)
    losses = []
    for _ in range(2):
        losses.append(program.step(**batch).item())
        schedule.step()
    program.save_checkpoint(folder, scheduler=schedule)
    resumed, batch = made(torch.float64, state="ddp", **how)
    again = torch.optim.lr_scheduler.LinearLR(resumed.optimizer, 0.5, total_iters=3)
    resumed.load_checkpoint(folder, scheduler=again)
    losses.append(resumed.step(**batch).item())
    again.step()
    return {
        "losses": losses,
        "state": resumed.state_dict(),
        "average": resumed.ema_state_dict(),
        "trained": {n for n, _ in program._executor.weights.named},
        "rates": [group["lr"] for group in resumed.optimizer.param_groups],
        "saved": program.state_dict(),
        "means": program.ema_state_dict(),
    }


def check_tuned(found: dict[str, Any]) -> None:
    model, batch = net(torch.float64, adapted=True)
    wanted = judge(model, batch, Precision(), ADAMW, 3, ema=0.9, groups=no_decay, scheduled=True)
    assert found["losses"] == pytest.approx(wanted.losses, rel=1e-12)
    assert error(found["state"], wanted.state) < 1e-12
    assert error(found["average"], wanted.average) < 1e-12
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert found["trained"] == names  # frozen ones have no state
    assert found["rates"] == pytest.approx([1e-2, 3e-2])


def low(folder: str, **how: Any) -> dict[str, Any]:
    """bf16 under ZeRO-3, saved, and gone on with under DDP."""
    program, batch = made(precision="bf16", state="zero3", **how)
    found = run(program, batch, 2)
    program.save_checkpoint(folder)
    resumed, batch = made(precision="bf16", state="ddp", microbatches=2, **how)
    resumed.load_checkpoint(folder)
    after = run(resumed, batch, 1)
    held = {k: t.dtype for k, t in program._executor.named.items()}
    return {"losses": found.losses + after.losses, "saved": found.state, "held": held} | {
        "state": after.state
    }


def check_low(found: dict[str, Any], folder: str) -> None:
    model, batch = net()
    wanted = judge(model, batch, Precision("bf16"), steps=3)
    # The batch is split into four: a gradient is rounded to bf16 in each part.
    assert found["losses"] == pytest.approx(wanted.losses, rel=5e-3)
    assert error(found["state"], wanted.state) < 0.02
    assert {str(dtype) for dtype in found["held"].values()} == {"torch.bfloat16", "torch.float32"}
    plain = autopar.load_checkpoint(folder)
    model.load_state_dict(plain)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, found["saved"][name])


def quickly(folder: str, how: dict[str, Any]) -> dict[str, Any]:
    return {
        "overflow": overflowing(**how),
        "tuned": tuned(f"{folder}/tuned", **how),
        "low": low(f"{folder}/low", **how),
    }


@pytest.mark.parametrize(
    "how",
    [
        {},
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ({"fuse": ["adamw"]}, {"offload": "optimizer"})
        ),
    ],
    ids=["torch", "kernel", "host"],
)
def test_training_on_two_ranks_is_that_of_one_device(how: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_all(run_ranks(quickly, folder, how, count=2), folder)


def check_all(ranks: list[dict[str, Any]], folder: str) -> None:
    for found in ranks:
        check_tuned(found["tuned"])
        check_low(found["low"], f"{folder}/low")
    check_overflow([found["overflow"] for found in ranks])
    means = autopar.load_checkpoint(Path(folder) / "tuned", average=True)
    assert error(means, ranks[0]["tuned"]["means"]) == 0.0


def thoroughly(folder: str) -> dict[str, Any]:
    found = [masters(state, count) for state, count in CASES]
    # Tied weights in two stages, and backwards in halves.
    staged = {"pins": None, "stages": 2}
    found += [masters("zero1", 4, schedule=name, **staged) for name in STAGED]
    found += [masters("zero1", 4, offload="optimizer", **how) for how in ({}, staged)]
    return {**quickly(folder, {}), "masters": found}


def gone_on(folder: str) -> dict[str, Any]:
    """On fewer ranks, from what four have saved after two steps."""
    program, batch = made(precision="bf16", state="zero1")
    program.load_checkpoint(f"{folder}/low")
    return {"loaded": program.state_dict(), "after": run(program, batch, 1).state}


CASES = [("ddp", 1), ("zero1", 2), ("paro-iig over node", 2), ("zero++ over node", 2)]
STAGED = ["1f1b", "zb_h1"]
COUNTS = [*(count for _, count in CASES), *(4 for _ in STAGED), 4, 4]


@pytest.mark.slow
def test_training_on_four_ranks_is_that_of_one_device() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(thoroughly, folder)
        check_all(ranks, folder)
        for found in ranks:
            for count, after in zip(COUNTS, found["masters"], strict=True):
                check_masters(after, count)
        for found in run_ranks(gone_on, folder, count=2):
            assert error(found["loaded"], ranks[0]["low"]["saved"]) == 0.0
            assert error(found["after"], ranks[0]["low"]["state"]) < 0.01

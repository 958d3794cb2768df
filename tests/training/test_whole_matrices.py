"""Optimizers that mix the elements of a matrix, however it is split, against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.pins import data_parallel
from tests.support.mixing import FACTORIES, batches, reference, words
from tests.support.ranks import run_ranks

SPLIT = {"fc.weight": "[20@gpu, 12]", "proj.weight": "[12, 20@gpu]"}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"state": "ddp", "pins": [data_parallel()]},
    "zero1": {"state": "zero1", "pins": [data_parallel()]},
    "zero2": {"state": "zero2", "pins": [data_parallel()], "microbatches": 2},
    "zero3": {"state": "zero3", "pins": [data_parallel()]},
    "tensor": {"state": "ddp", "pins": SPLIT},
}
STEPS, TOLERANCE = 4, 1e-9
Found = dict[str, tuple[list[float], dict[str, Tensor]]]  # losses and parameters by plan


def _train_all(mesh: str, given: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Found]:
    """Returns what optimizers do under plans of their own."""
    return {name: _train(mesh, name, plans) for name, plans in given.items()}


def _train(mesh: str, name: str, plans: dict[str, dict[str, Any]]) -> Found:
    """Returns losses and parameters under every plan."""
    found = {}
    for plan, options in plans.items():
        program = autopar.compile(words(), mesh, optimizer=FACTORIES[name], **options)
        losses = [float(program.step(**batch)) for batch in batches(STEPS)]
        stage = program.plan.stages[0]
        names = [name.replace(".", "_") for name, _ in words().named_parameters()]
        split = [n for n in names if stage.storage(n, f"{n}_share").updated.sharded_axes]
        assert bool(split) == (plan != "ddp")
        found[plan] = losses, {k: v.detach() for k, v in program.state_dict().items()}
        program.close()
    return found


def _check(mesh: str, given: dict[str, dict[str, dict[str, Any]]], count: int = 4) -> None:
    for found in run_ranks(_train_all, mesh, given, count=count):
        for name, plans in found.items():
            _compare(name, plans)


def _compare(name: str, found: Found) -> None:
    losses, state = reference(name, batches(STEPS))
    for plan, (own, values) in found.items():
        assert own == pytest.approx(losses, rel=TOLERANCE), (name, plan)
        for key, value in state.items():
            error = float((values[key] - value).abs().max())
            assert error <= TOLERANCE, (name, plan, key, error)


def test_two_ranks_train_as_one_process() -> None:
    """Muon in every plan, and others where their matrices are split, or all states."""
    few = {plan: PLANS[plan] for plan in ("zero3", "tensor")}
    _check("cpu: gpu=2", {name: PLANS if name == "muon" else few for name in FACTORIES}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_every_optimizer_trains_in_every_plan(count: int) -> None:
    _check(f"cpu: gpu={count}", dict.fromkeys(FACTORIES, PLANS), count)


BOTH = {
    "both": {"state": "ddp", "pins": [data_parallel("node"), SPLIT]},
    "zero1": {"state": "zero1", "pins": [data_parallel("node"), SPLIT]},
}


def test_replicas_of_parts_share_what_owners_need() -> None:
    """Tensor parallelism inside of data parallelism, with states split over neither or one."""
    _check("cpu: node=2, gpu=2", {"muon": BOTH})


@pytest.mark.slow
def test_replicas_of_parts_train_by_every_optimizer() -> None:
    _check("cpu: node=2, gpu=2", dict.fromkeys(FACTORIES, BOTH))


def _save_and_resume(folder: str, names: list[str]) -> list[tuple[list[float], list[float]]]:
    """Returns losses after a checkpoint under ZeRO-3, and those of a split program from it on."""
    found = []
    for name in names:
        path = f"{folder}/{name}"
        found.append((_save(path, name), _resume(path, name, "cpu: gpu=2", "tensor")))
    return found


def _save(folder: str, name: str) -> list[float]:
    options = PLANS["zero3"]
    program = autopar.compile(words(), "cpu: gpu=2", optimizer=FACTORIES[name], **options)
    steps = batches(STEPS)
    for batch in steps[:2]:
        program.step(**batch)
    program.save_checkpoint(folder)
    losses = [float(program.step(**batch)) for batch in steps[2:]]
    program.close()
    return losses


def _resume(folder: str, name: str, mesh: str, plan: str) -> list[float]:
    torch.manual_seed(5)
    model = words()
    for parameter in model.parameters():
        parameter.data.normal_()
    program = autopar.compile(model, mesh, optimizer=FACTORIES[name], **PLANS[plan])
    steps = batches(STEPS)
    program.step(**steps[0])  # so that there is a state to be replaced
    program.load_checkpoint(folder)
    losses = [float(program.step(**batch)) for batch in steps[2:]]
    program.close()
    return losses


@pytest.mark.parametrize(
    "names",
    [["muon"], pytest.param(sorted(FACTORIES.keys() - {"muon"}), marks=pytest.mark.slow)],
    ids=["muon", "others"],
)
def test_checkpoints_are_resharded(names: list[str], tmp_path: Path) -> None:
    """Saved under ZeRO-3 on two ranks; resumed with split operators, and on one device."""
    ranks = run_ranks(_save_and_resume, str(tmp_path), names, count=2)
    for number, name in enumerate(names):
        whole, _ = reference(name, batches(STEPS))
        alone = _resume(str(tmp_path / name), name, "cpu: gpu=1", "ddp")
        for losses in (*ranks[0][number], *ranks[1][number], alone):
            assert losses == pytest.approx(whole[2:], rel=TOLERANCE), name


def test_muon_of_bf16_is_torchs_to_the_bit() -> None:
    """On one device, the update of the same gradients by torch's Muon and by this one."""
    torch.manual_seed(0)
    for shape in ((6, 17), (17, 6), (5, 5)):
        for adjust in (None, "match_rms_adamw"):
            start = torch.randn(shape)
            ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
            pair = (
                autopar.muon(lr=0.05, adjust_lr_fn=adjust)([ours]),
                torch.optim.Muon([theirs], lr=0.05, adjust_lr_fn=adjust),
            )
            for _ in range(3):
                gradient: Tensor = torch.randn(shape)
                for parameter, optimizer in zip((ours, theirs), pair, strict=True):
                    parameter.grad = gradient.clone()
                    optimizer.step()
            assert torch.equal(ours, theirs)

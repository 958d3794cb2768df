"""Programs that replace one another during training.

The oracle is the unsharded model in plain torch, trained without interruption, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, ProgramError
from autopar.ir.mesh import Mesh
from autopar.pins import data_parallel, megatron
from tests.programs.test_checkpoints import language
from tests.support.ranks import run_ranks

GRID = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
LINE, PAIR = "cpu: data=4 @1TB/s 1ns", "cpu: data=2 @1TB/s 1ns"
CLIP, EMA = 0.5, 0.9
# What takes over after every second step: mesh and options of each program.
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": (LINE, {"pins": data_parallel("data"), "state": "ddp"}),
    "pipeline": (LINE, {"stages": 2, "microbatches": 4, "schedule": "1f1b"}),
    "zero3": (LINE, {"pins": data_parallel("data"), "state": "zero3"}),
    "megatron": (GRID, {"pins": [data_parallel("data"), megatron("tensor")]}),
    "free": (GRID, {}),
    "interleaved": (GRID, {"stages": 4, "microbatches": 4, "schedule": "zb_v"}),
}
EACH = 2


class Counting(nn.Module):
    """A model with a batch norm, a buffer that it counts in, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # No bias: in front of a batch norm its gradient is rounding, which AdamW takes for a sign.
        self.first, self.norm = nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12)
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.last = nn.Linear(12, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h = torch.tanh(self.norm(self.first(x))) * self.frozen
        return self.last(h).square().mean()


def counting() -> tuple[nn.Module, dict[str, Tensor]]:
    model = Counting().double()
    torch.manual_seed(3)
    return model, {"x": torch.randn(8, 8, dtype=torch.float64)}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)


@functools.cache
def alone(make: Callable[[], Any], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of the unsharded model; the average under "ema.NAME"."""
    model, batch = make()
    optimizer = optimizer_of(model.parameters())
    scheduler, losses = rates(optimizer), []
    means = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if name in means:
                means[name].lerp_(parameter.detach(), 1 - EMA)
    return losses, model.state_dict() | {f"ema.{name}": mean for name, mean in means.items()}


def through(make: Callable[[], Any], names: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of a session that adopts one program after the other."""
    model, batch = make()
    (mesh, options), *others = (PROGRAMS[name] for name in names)
    session = autopar.compile(
        model, mesh, optimizer=optimizer_of, example_inputs=batch, clip_norm=CLIP, ema=EMA,
        **options,
    )  # fmt: skip
    scheduler, losses = rates(session.optimizer), []
    for step in range(EACH * len(names)):
        if step and step % EACH == 0:
            mesh, options = others[step // EACH - 1]
            session.adopt(
                autopar.emit(
                    model, mesh, optimizer=optimizer_of, example_inputs=batch, ema=EMA, **options
                )
            )
            assert session.plan.is_pipeline == ("stages" in options)
        losses.append(session.step(**batch).item())
        scheduler.step()
    found = session.state_dict()
    found |= {f"ema.{name}": value for name, value in session.ema_state_dict().items()}
    session.close()
    return losses, found


def compare(make: Callable[[], Any], names: list[str]) -> None:
    losses, state = alone(make, EACH * len(names))
    for found, values in run_ranks(through, make, names):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=1e-10, atol=1e-12)


def test_data_parallel_then_a_pipeline_then_zero3_train_as_one_run() -> None:
    compare(language, ["data parallel", "pipeline", "zero3"])


@pytest.mark.slow
def test_all_programs_take_over_from_one_another() -> None:
    compare(language, ["interleaved", "megatron", "pipeline", "data parallel", "zero3", "megatron"])


def test_buffers_and_frozen_parameters_go_along() -> None:
    compare(counting, ["free", "zero3"])


def refusals() -> tuple[list[str], list[float]]:
    """Returns the errors of a session that cannot adopt programs, and its losses between them."""
    model, batch = language()
    options: dict[str, Any] = {"example_inputs": batch, "pins": data_parallel("data")}
    session = autopar.compile(model, PAIR, optimizer=optimizer_of, clip_norm=CLIP, **options)
    scheduler = rates(session.optimizer)
    other, others_batch = counting()
    own = autopar.emit(model, PAIR, **options)
    programs = {
        "another model": autopar.emit(other, PAIR, example_inputs=others_batch),
        "another mesh": replace(own, plan=replace(own.plan, mesh=Mesh.parse(LINE))),
        "another rank": replace(own, sources=(own.sources[0] + f"\n{dist.get_rank()}",)),
    }
    said, losses = [], []
    for program in programs.values():
        with pytest.raises(AutoparError) as refused:
            session.adopt(program)
        said.append(f"{type(refused.value).__name__}: {refused.value}")
        losses.append(session.step(**batch).item())
        scheduler.step()
    # A program that does not start leaves the one before, more than once.
    broken = replace(own, sources=("raise RuntimeError('no such kernel')",))
    for _ in range(2):
        with pytest.raises(Exception, match="no such kernel"):
            session.adopt(broken)
        losses.append(session.step(**batch).item())
        scheduler.step()
    session.close()
    with pytest.raises(ProgramError, match="closed"):
        session.adopt(own)
    return said, losses


def test_what_does_not_fit_is_refused_by_name_and_training_goes_on() -> None:
    losses, _ = alone(language, 5)
    for said, found in run_ranks(refusals, count=2):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        model, mesh, rank = said
        assert model.startswith("ProgramError: the compiled program is of another model")
        assert "model.transformer.wte.weight" in model
        assert mesh.startswith(f"MeshError: mesh '{LINE}' has 4 devices")
        assert rank.startswith("RanksDifferError: the ranks differ in the compiled program")


# Adopting against saving and loading --------------------------------------------------------------

Making = Callable[[Any], torch.optim.Optimizer]
# Options of both programs beside their plans, and the optimizer.
FEATURES: dict[str, tuple[dict[str, Any], Making]] = {
    "masters": ({"precision": "bf16"}, optimizer_of),
    "masters and dropout": ({"precision": "bf16"}, optimizer_of),
    "a scaled loss": ({"precision": "fp16"}, optimizer_of),
    "state on the host": ({"precision": "bf16", "offload": "optimizer"}, optimizer_of),
    "groups": ({"groups": autopar.groups({"*.bias": {"weight_decay": 0.0}})}, optimizer_of),
    "momentum": ({}, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "dropout": ({}, optimizer_of),
    "a kernel for the update": ({"fuse": ["adamw"]}, optimizer_of),
}
FIRST: dict[str, Any] = {"pins": data_parallel("data"), "state": "zero3"}
SECOND: dict[str, Any] = {"stages": 2, "microbatches": 4}


def both(feature: str, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of a session that adopts a pipeline, and of one that loads the other's checkpoint."""
    options, make = FEATURES[feature]
    double = "precision" not in options
    planning = {name: value for name, value in options.items() if name != "groups"}

    def compiled(**more: Any) -> tuple[autopar.Session, nn.Module, dict[str, Tensor]]:
        model, batch = language(dropout=0.1 if "dropout" in feature else 0.0)
        model = model if double else model.float()
        torch.manual_seed(7)
        session = autopar.compile(
            model, PAIR, optimizer=make, example_inputs=batch, **options, **more
        )
        return session, model, batch

    def steps(session: autopar.Session, batch: dict[str, Tensor]) -> list[float]:
        return [session.step(**batch).item() for _ in range(EACH)]

    session, model, batch = compiled(**FIRST)
    losses = steps(session, batch)
    session.save_checkpoint(folder)
    session.adopt(
        autopar.emit(model, PAIR, optimizer=make, example_inputs=batch, **planning, **SECOND)
    )
    adopted = [*losses, *steps(session, batch)]
    other, _, _ = compiled(**SECOND)
    other.load_checkpoint(folder)
    return adopted, [*losses, *steps(other, batch)]


@pytest.mark.parametrize(
    "feature",
    [
        name if name == "masters and dropout" else pytest.param(name, marks=pytest.mark.slow)
        for name in FEATURES
    ],
)
def test_adopting_is_saving_and_loading_to_the_bit(feature: str, tmp_path: Path) -> None:
    for adopted, loaded_again in run_ranks(both, feature, tmp_path / "checkpoint", count=2):
        assert adopted == loaded_again
        assert len(set(adopted)) > EACH  # a step that the scaler leaves out changes nothing

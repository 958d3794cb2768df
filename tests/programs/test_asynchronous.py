"""Asynchronous pipelines train like a simulation of stale weights; see `stale_weights.py`."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from tests.support.ranks import run_ranks
from tests.support.stale_weights import (
    METHODS,
    OPTIMIZERS,
    STEPS,
    Method,
    made,
    program_of,
    simulated,
)  # fmt: skip


def trained(
    pairs: list[tuple[str, str]], stages: int, ranks: int, how: dict[str, Any]
) -> dict[tuple[str, str], tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights of methods with optimizers."""
    found = {}
    for name, optimizer in pairs:
        program, batches = program_of(METHODS[name], stages, optimizer, ranks, **how)
        losses = [program.step(**batch).item() for batch in batches]
        found[name, optimizer] = losses, program.state_dict()
        program.close()
    return found


def check(names: list[str], stages: int, ranks: int, **how: Any) -> None:
    """Compares every method with every optimizer."""
    check_pairs([*product(names, OPTIMIZERS)], stages, ranks, **how)


def check_pairs(pairs: list[tuple[str, str]], stages: int, ranks: int, **how: Any) -> None:
    every = run_ranks(trained, pairs, stages, ranks, how, count=ranks)
    wrong = []
    for name, optimizer in pairs:
        method = METHODS[name]
        losses, weights = simulated(method, stages, optimizer, how.get("clip_norm"))
        first = method.flushed
        # A step gives the loss of the one before, the first one that does not flush its own.
        told = [losses[max(first, n - method.late) if n > first else n] for n in range(STEPS)]
        for rank in every:
            ours, state = rank[name, optimizer]
            error = max(
                *(abs(a - b) for a, b in zip(ours, told, strict=True)),
                *(float((state[k] - v).abs().max()) for k, v in weights.items()),
            )
            if not error < 1e-12:
                wrong.append(f"{name} with {optimizer} in {stages} stages: off by {error:.2g}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_stages_that_do_not_wait_train_as_stale_weights_do() -> None:
    """Every kind of method and every optimizer once."""
    check_pairs([("2bw", "adamw"), ("pipemare", "momentum"), ("ampnet", "sgd")], 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_method_trains_as_stale_weights_do(stages: int) -> None:
    check([*METHODS], stages, stages)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["ddp", "zero1", "zero2"])
def test_stages_of_two_devices_train_as_those_of_one(state: str) -> None:
    """Data parallelism inside a stage, and its optimizer's state split."""
    names = ["pipedream", "few", "2bw", "ampnet of two", *(["bounded"] if state == "ddp" else [])]
    pins = autopar.pins.data_parallel("gpu")
    check(names, 2, 4, state=state, pins=pins)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize(("state", "clip"), [("ddp", None), ("zero1", 0.1)])
def test_stages_of_unequal_numbers_of_devices(
    sizes: tuple[int, ...], state: str, clip: float | None
) -> None:
    names = ["pipedream", "vertical", "2bw", "ampnet of two", "pipemare plain"]
    names += ["pipemare", "bounded"] if state == "ddp" else []
    pins = autopar.pins.data_parallel("gpu")
    check(names, len(sizes), sum(sizes), sizes=sizes, state=state, clip_norm=clip, pins=pins)


@pytest.mark.slow
def test_each_stage_clips_the_norm_of_its_own_gradients() -> None:
    check(["pipedream", "2bw", "pipemare plain", "pipemare flushed"], 3, 3, clip_norm=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["zero1", "zero2"])
def test_one_stage_clips_gradients_that_are_split_unevenly(state: str) -> None:
    """Of the six rows of a weight, two of four devices update two each, the others one each."""
    pins = autopar.pins.data_parallel("gpu")
    check(["few"], 1, 4, state=state, clip_norm=0.1, pins=pins)


@pytest.mark.slow
def test_one_stage_of_every_method_clips_split_gradients() -> None:
    names = ["pipedream", "vertical", "2bw", "ampnet of two"]
    check(names, 1, 2, state="zero1", clip_norm=0.1, pins=autopar.pins.data_parallel("gpu"))


def in_bf16(names: list[str]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Losses and masters of runs that compute in bfloat16."""
    found = {}
    for name in names:
        program, batches = program_of(METHODS[name], 2, "momentum", 2, precision="bf16")
        losses = [program.step(**batch).item() for batch in batches]
        found[name] = losses, program.state_dict()
        program.close()
    return found


def simulated_in_bf16(method: Method) -> tuple[list[float], dict[str, Tensor]]:
    """The same by autograd, for methods whose backward runs on the weights of its forward."""
    model, batches = made(2)
    model = model.float()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    names = [name for name, _ in model.named_parameters()]
    versions = [[p.detach().clone() for p in model.parameters()]]
    n, losses = method.microbatches, []
    for step, batch in enumerate(batches):
        total = 0.0
        for number in range(n):
            k = step * n + number
            x, y = (batch[name].float().bfloat16().chunk(n)[number] for name in "xy")
            used = []
            for place, name in enumerate(names):
                version = versions[method.forward(int(name.split(".")[1]), 2, k)]
                used.append(version[place].bfloat16().requires_grad_())
            for weight, bias in zip(used[::2], used[1::2], strict=True):
                x = torch.tanh(F.linear(x, weight, bias))
            loss = F.mse_loss(x.float(), y.float())  # losses are computed in float32
            total += loss.item() / n
            (loss / method.taken).backward()
            for parameter, own in zip(model.parameters(), used, strict=True):
                assert own.grad is not None
                known = 0.0 if parameter.grad is None else parameter.grad
                parameter.grad = own.grad.float() + known
            if (number + 1) % method.taken == 0:
                optimizer.step()
                optimizer.zero_grad()
                versions.append([p.detach().clone() for p in model.parameters()])
        losses.append(total)
    return losses, dict(model.state_dict())


@pytest.mark.slow
def test_masters_are_updated_and_versions_held_in_bfloat16() -> None:
    names = ["pipedream", "2bw"]
    (ours, _), (reference, exact) = run_ranks(in_bf16, names, count=2), ({}, {})
    for name in names:
        reference[name] = simulated_in_bf16(METHODS[name])
        exact[name] = simulated_in_bf16(
            dataclasses.replace(
                METHODS[name], forward=lambda s, p, k, n=name: newest(METHODS[n], k)
            )
        )
    for name in names:
        losses, weights = ours[name]
        told, state = reference[name]
        assert losses == pytest.approx([told[0], *told[:-1]], abs=1e-6)
        error, apart = (
            max(float((weights[k] - v).abs().max()) for k, v in other.items())
            for other in (state, exact[name][1])
        )
        assert error < 1e-6 < 1e-2 < apart


def newest(method: Method, k: int) -> int:
    """The version of a run that does not fall behind."""
    return k // method.taken

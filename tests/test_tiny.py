"""autopar in thirty lines, the test to read first: capture, plan, emit, train on two processes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from tests.support.ranks import run_ranks

MESH = "cpu[10GFLOP/s 1GiB 5GB/s]: gpu=2 @10GB/s 1us"  # slow enough that two are worth it
BATCH = {"input": torch.arange(64.0, dtype=torch.float64).reshape(8, 8).sin()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).double()


def loss(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.arange(8) % 4)


def train() -> tuple[list[float], str]:
    """What every rank runs: three steps of the parallel program."""
    program = autopar.compile(model(), MESH, example_inputs=BATCH, loss_fn=loss)
    return [program.step(**BATCH).item() for _ in range(3)], program.source


def test_two_processes_train_as_one() -> None:
    plain = copy.deepcopy(model())
    optimizer, losses = torch.optim.AdamW(plain.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(plain(**BATCH))
        value.backward()
        optimizer.step()
        losses.append(value.item())

    for trained, source in run_ranks(train, count=2):
        torch.testing.assert_close(trained, losses, rtol=1e-12, atol=0)
        assert "def forward(mesh, p, batch" in source  # the program is plain PyTorch, and readable
        assert "@gpu" in source


def test_a_plan_says_how_every_tensor_is_split() -> None:
    plan = autopar.plan(model(), MESH, example_inputs=BATCH, loss_fn=loss)
    assert autopar.Plan.from_toml(plan.to_toml()) == plan
    assert "8@gpu" in plan.to_toml()  # the batch, or a dimension of the weights

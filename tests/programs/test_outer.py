"""Independent replicas compute the same as one process that simulates all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from tests.support.outer_simulation import simulated
from tests.support.ranks import run_ranks

STEPS = 7
INSIDE: dict[str, dict[str, Any]] = {
    "plain": {"state": "ddp"},
    "zero1": {"state": "zero1"},
    "zero3": {"state": "zero3"},
    "tensor": {"pins": {"0.weight": "[24@gpu, 8]"}, "state": "ddp"},
    "stages": {"stages": 2, "microbatches": 2, "schedule": "1f1b"},
}
METHODS = [
    "local over node, tau={}",
    "slowmo over node, tau={}, beta=0.6, rate=0.9",
    "overlap over node, tau={}, alpha=0.5, beta=0.3",
    "co2 over node, tau={}, beta=0.4, clip=0.002, penalty=rate",
    "co2 over node, tau={}, beta=0.4, clip=off, penalty=off",
    "diloco over node, tau={}, rate=0.8, beta=0.7",
    "co2 over node, tau={}, beta=0.4, clip=0.002, penalty=rate, origin=round",
]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
    return nn.Sequential(*layers).double()


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels)


def batch(step: int) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    return {"input": torch.randn(8, 8).double(), "labels": torch.randint(4, (8,))}


def trained(cases: list[tuple[str, str, str]], mesh: str) -> list[Any]:
    found = []
    for outer, optimizer, inside in cases:
        how = INSIDE[inside]
        session = autopar.compile(
            model(), mesh, example_inputs=batch(0), loss_fn=loss, outer=outer,
            optimizer=OPTIMIZERS[optimizer], **how,
        )  # fmt: skip
        losses = [session.step(**batch(step)).item() for step in range(STEPS)]
        own = session._executor.program.state_dict()
        agreed = session.state_dict()
        found.append((losses, own, agreed, session.rounds.number))
        session.close()
    return found


def check(cases: list[tuple[str, str, str]], mesh: str, count: int) -> list[list[Any]]:
    """Compares every case with its simulation; returns what the ranks have."""
    ranks = run_ranks(trained, cases, mesh, count=count)
    replicas = 2
    for rank, found in enumerate(ranks):
        replica = rank // (count // replicas)
        for case, (losses, own, agreed, rounds) in zip(cases, found, strict=True):
            outer, optimizer, _ = case
            batches = [batch(step) for step in range(STEPS)]
            wanted = simulated(model(), loss, OPTIMIZERS[optimizer], batches, replicas, outer)
            torch.testing.assert_close(losses, wanted.losses[replica], rtol=1e-12, atol=1e-12)
            for name, value in wanted.parameters[replica].items():
                torch.testing.assert_close(own[name], value, rtol=1e-12, atol=1e-12, msg=str(case))
                torch.testing.assert_close(
                    agreed[name], wanted.agreed[name], rtol=1e-12, atol=1e-12
                )
            assert rounds == wanted.rounds
    return ranks


def test_methods_on_two_ranks() -> None:
    """All methods; averaging the parameters of SGD after every step is data parallelism."""
    cases = [(text.format(2), "adamw", "plain") for text in METHODS]
    cases += [(METHODS[3].format(3), "sgd", "plain"), (METHODS[0].format(1), "sgd", "plain")]
    ranks = check(cases, "cpu: node=2, gpu=1", 2)
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        given = batch(step)
        loss(network(given["input"]), given["labels"]).backward()
        optimizer.step()
    for rank in ranks:
        _, own, _, _ = rank[-1]
        for name, value in network.named_parameters():
            torch.testing.assert_close(own[name], value.detach(), rtol=1e-12, atol=1e-12)


def test_any_plan_runs_inside_a_replica() -> None:
    cases = [
        (METHODS[3].format(2), "adamw", "zero3"),
        (METHODS[5].format(2), "adamw", "tensor"),
        (METHODS[2].format(2), "adamw", "stages"),
    ]
    check(cases, "cpu: node=2, gpu=2", 4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("inside", INSIDE)
def test_every_method_in_every_plan(inside: str, optimizer: str) -> None:
    cases = [(text.format(tau), optimizer, inside) for text in METHODS for tau in (1, 2, 3, 5)]
    check(cases, "cpu: node=2, gpu=2", 4)

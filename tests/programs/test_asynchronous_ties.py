"""Parameters that several stages hold, in pipelines that do not flush."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import ProgramError, ScheduleError
from tests.support.ranks import run_ranks
from tests.support.stale_weights import BATCH, OPTIMIZERS, STEPS, WIDTH, mesh

MICROBATCHES = 4


class Tied(nn.Module):
    """Four layers; the first and the last have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


# Schedule -> microbatches in an update, and (stages, microbatch) -> the version that all stages
# run it on, forwards and backwards.
METHODS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "2bw": (4, lambda p, k: max(0, k // 4 - 1)),
    "pipedream vertical=1": (1, lambda p, k: max(0, k - (p - 1))),
    "bounded_staleness ahead=2": (4, lambda p, k: max(0, k // 4 - 2)),
}


def model_and_batches() -> tuple[Tied, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Tied().double()
    rows = [
        {name: torch.randn(BATCH, WIDTH, dtype=torch.float64) for name in "xy"}
        for _ in range(STEPS)
    ]
    return model, rows


def simulated(schedule: str, stages: int, optimizer: str) -> dict[str, Tensor]:
    """Weights of one process, by autograd on the version of each microbatch."""
    every, version = METHODS[schedule]
    model, batches = model_and_batches()
    old, steps = Tied().double(), OPTIMIZERS[optimizer](model.parameters())
    versions = [{k: v.clone() for k, v in model.state_dict().items()}]
    for step, batch in enumerate(batches):
        for number in range(MICROBATCHES):
            k = step * MICROBATCHES + number
            old.load_state_dict(versions[version(stages, k)])
            parts = {name: value.chunk(MICROBATCHES)[number] for name, value in batch.items()}
            gradients = torch.autograd.grad(old(**parts) / every, [*old.parameters()])
            for parameter, own in zip(model.parameters(), gradients, strict=True):
                parameter.grad = own if parameter.grad is None else parameter.grad + own
            if (k + 1) % every == 0:
                steps.step()
                steps.zero_grad()
                versions.append({k: v.clone() for k, v in model.state_dict().items()})
    return versions[-1]


def compiled(schedule: str, stages: int, ranks: int, optimizer: str, **how: Any) -> Any:
    model, batches = model_and_batches()
    return autopar.compile(
        model, mesh(ranks), example_inputs=batches[0], stages=stages, microbatches=MICROBATCHES,
        schedule=schedule, optimizer=OPTIMIZERS[optimizer], allow="stale gradients", **how,
    )  # fmt: skip


Pairs = list[tuple[str, str]]
ALL: Pairs = [*product(METHODS, OPTIMIZERS)]


def trained(
    stages: int, ranks: int, pairs: Pairs, how: dict[str, Any]
) -> dict[tuple[str, str], Any]:
    """Weights by methods with optimizers, and both copies of the shared one, as held."""
    found = {}
    for schedule, optimizer in pairs:
        program = compiled(schedule, stages, ranks, optimizer, **how)
        for batch in model_and_batches()[1]:
            program.step(**batch)
        state = program.state_dict()
        own = [
            stage.named["layers.0.weight"].detach().clone()
            for stage in program._executor.stages.values()
            if "layers.0.weight" in stage.named
        ]
        found[schedule, optimizer] = state, own
        program.close()
    return found


def check(stages: int, ranks: int, pairs: Pairs = ALL, **how: Any) -> None:
    every = run_ranks(trained, stages, ranks, pairs, how, count=ranks)
    for schedule, optimizer in pairs:
        weights = simulated(schedule, stages, optimizer)
        copies = []
        for rank in every:
            state, own = rank[schedule, optimizer]
            copies += own
            for name, value in weights.items():
                error = float((state[name] - value).abs().max())
                assert error < 1e-12, f"{schedule} with {optimizer}: {name} off by {error:.2g}"
        assert len(copies) >= 2
        assert all(torch.equal(copies[0], copy) for copy in copies)


def test_copies_of_a_parameter_get_the_sum_of_their_gradients() -> None:
    """By every method, and with every optimizer once."""
    check(2, 2, [*zip(METHODS, reversed(OPTIMIZERS), strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_copies_far_apart_train_as_one(stages: int) -> None:
    check(stages, stages)


@pytest.mark.slow
def test_copies_of_replicas_train_as_one() -> None:
    check(2, 4, pins=autopar.pins.data_parallel("gpu"), state="ddp")


def refused() -> dict[str, str]:
    """What is said where copies would part."""
    said = {}
    for name in ("pipedream", "pipemare", "ampnet"):
        with pytest.raises(ScheduleError) as raised:
            compiled(name, 2, 2, "sgd")
        said[name] = str(raised.value)
    with pytest.raises(ProgramError) as clipped:
        compiled("2bw", 2, 2, "sgd", clip_norm=1.0)
    return {**said, "clip": str(clipped.value)}


def test_copies_that_would_part_are_refused_with_the_reason() -> None:
    (said, _) = run_ranks(refused, count=2)
    for name in ("pipedream", "pipemare", "ampnet"):
        assert "'layers.0.weight', which is held by the stages 0 and 1" in said[name]
        assert "updates later than stage 1" in said[name]
    assert "a norm of its own" in said["clip"]


def saved(folder: str) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that goes on in the midst of it."""
    whole, again = (compiled("2bw", 2, 2, "adamw") for _ in range(2))
    losses: dict[bool, list[float]] = {True: [], False: []}
    for step, batch in enumerate(model_and_batches()[1]):
        if step == 4:
            whole.save_checkpoint(folder)
            again.load_checkpoint(folder)
        losses[True].append(whole.step(**batch).item())
        if step >= 4:
            losses[False].append(again.step(**batch).item())
    for program in (whole, again):
        program.close()
    return losses[True][4:], losses[False]


def test_a_checkpoint_has_gradients_that_wait_for_another_stage(tmp_path: Any) -> None:
    for whole, again in run_ranks(functools.partial(saved, str(tmp_path)), count=2):
        assert whole == again

"""Bytes of asynchronous pipelines: those of a plan, and those that are alive on ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.alive import Alive
from tests.support.ranks import run_ranks
from tests.support.stale_weights import mesh

WIDTH, LAYERS, BATCH, STEPS = 160, 24, 8, 5
Case = tuple[str, str | None, str]  # schedule; precision, or the dtype of the model; state
STASHED = ("pipedream", "2bw")  # methods that hold older versions
CASES: tuple[Case, ...] = (
    *((name, None, "") for name in ("1f1b", "ampnet", "pipedream vertical=1", *STASHED)),
    *(("pipemare", name, "") for name in (None, "bf16", "float64")),
    ("pipemare correction=0", None, ""), ("bounded_staleness ahead=2", None, "ddp"),
    ("bounded_staleness ahead=2", "float64", "ddp"),
    *((name, how, "") for name in ("1f1b", "ampnet", *STASHED) for how in ("bf16", "float64")),
    *((name, how, "zero1") for name in ("1f1b", "ampnet", *STASHED) for how in (None, "bf16")),
    ("1f1b", "fp16", ""), ("1f1b", "fp16", "zero1"),  # others refuse a scale of the loss
)  # fmt: skip


class Wide(nn.Module):
    """Layers of whose bytes nearly all are weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def alive(cases: list[Case]) -> list[tuple[float, float]]:
    """Peak bytes of this rank in the steady state of every case, and those of the plan.

    With a state, two devices train one stage; without, there are two stages.
    """
    found = []
    for schedule, precision, state in cases:
        torch.manual_seed(0)
        dtype = torch.float64 if precision == "float64" else torch.float32
        model = Wide().to(dtype)
        batch = {name: torch.randn(BATCH, WIDTH, dtype=dtype) for name in "xy"}
        how: dict[str, Any] = {"stages": 2}
        if state:
            how = {"stages": 1, "state": state, "pins": autopar.pins.data_parallel("gpu")}
        program = autopar.compile(
            model, mesh(2), example_inputs=batch, microbatches=4, schedule=schedule,
            allow="stale gradients", precision=None if dtype == torch.float64 else precision,
            optimizer=functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9), **how,
        )  # fmt: skip
        held = [
            t for s in program._executor.stages.values() for t in (*s.tensors, *s.weights.updated)
        ]
        with Alive(held) as counted:
            for _ in range(STEPS):
                program.step(**batch)
            counted.curve.clear()
            program.step(**batch)
            peak = max(nbytes for _, nbytes in counted.curve)
        found.append((peak, program.plan.predicted.peak_bytes))
        program.close()
    return found


def check(cases: list[Case]) -> None:
    """All bytes of the fuller rank are within 5 % of the plan's."""
    wrong = []
    for case, (one, planned), (other, _) in zip(
        cases, *run_ranks(alive, cases, count=2), strict=True
    ):
        if max(one, other) != pytest.approx(planned, rel=0.05):
            wrong.append(f"{case}: {max(one, other):.0f} bytes, planned {planned:.0f}")
    assert not wrong, "\n".join(wrong)


def test_the_plan_counts_a_velocity_and_corrected_weights() -> None:
    check([("pipemare", "bf16", "")])


@pytest.mark.slow
def test_the_plan_counts_versions_velocities_masters_and_late_sums() -> None:
    check([*CASES])

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

WIDTH, BATCH, STEPS = 192, 8, 6
# Schedule -> stages on two ranks.
SCHEDULES = {
    "1f1b": 2, "pipedream": 2, "pipedream vertical=1": 2, "2bw": 2, "ampnet": 2, "pipemare": 2,
    "pipemare correction=0": 2, "bounded_staleness ahead=2": 1,
}  # fmt: skip


class Wide(nn.Module):
    """Four layers, of whose bytes nearly all are weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def alive(precision: str | None) -> dict[str, tuple[float, float]]:
    """Peak bytes of this rank in the steady state under every schedule, and those of the plan."""
    found = {}
    for schedule, stages in SCHEDULES.items():
        if precision and schedule.startswith("bounded"):
            continue  # refused
        torch.manual_seed(0)
        model, batch = Wide(), {name: torch.randn(BATCH, WIDTH) for name in "xy"}
        how: dict[str, Any] = {"pins": autopar.pins.data_parallel("gpu")} if stages == 1 else {}
        with Alive() as counted:
            program = autopar.compile(
                model, mesh(2), example_inputs=batch, stages=stages, microbatches=4,
                schedule=schedule, allow="stale gradients", precision=precision,
                optimizer=functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9), **how,
            )  # fmt: skip
            for tensor in {t for s in program._executor.stages.values() for t in s.tensors}:
                counted.count(tensor)
            del model
            for _ in range(STEPS):
                program.step(**batch)
            counted.curve.clear()
            program.step(**batch)
            peak = max(nbytes for _, nbytes in counted.curve)
        found[schedule] = peak, program.plan.predicted.peak_bytes
        program.close()
    return found


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_plan_counts_versions_velocities_and_late_sums(precision: str | None) -> None:
    """All bytes of the fuller rank are within 5 % of the plan's."""
    first, second = run_ranks(alive, precision, count=2)
    for schedule, (one, planned) in first.items():
        assert max(one, second[schedule][0]) == pytest.approx(planned, rel=0.05), schedule

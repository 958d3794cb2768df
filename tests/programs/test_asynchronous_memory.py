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
# Schedule and precision -> stages on two ranks.
SCHEDULES: dict[tuple[str, str | None], int] = {
    ("1f1b", None): 2, ("pipedream", None): 2, ("pipedream vertical=1", None): 2, ("2bw", None): 2,
    ("ampnet", None): 2, ("pipemare", None): 2, ("pipemare correction=0", None): 2,
    ("bounded_staleness ahead=2", None): 1, ("2bw", "bf16"): 2, ("pipemare", "bf16"): 2,
}  # fmt: skip


class Wide(nn.Module):
    """Layers of whose bytes nearly all are weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def alive(names: list[tuple[str, str | None]]) -> dict[tuple[str, str | None], tuple[float, float]]:
    """Peak bytes of this rank in the steady state under every schedule, and those of the plan."""
    found = {}
    for schedule, precision in names:
        stages = SCHEDULES[schedule, precision]
        torch.manual_seed(0)
        model, batch = Wide(), {name: torch.randn(BATCH, WIDTH) for name in "xy"}
        how: dict[str, Any] = {"pins": autopar.pins.data_parallel("gpu")} if stages == 1 else {}
        program = autopar.compile(
            model, mesh(2), example_inputs=batch, stages=stages, microbatches=4,
            schedule=schedule, allow="stale gradients", precision=precision,
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
        found[schedule, precision] = peak, program.plan.predicted.peak_bytes
        program.close()
    return found


def check(names: list[tuple[str, str | None]]) -> None:
    """All bytes of the fuller rank are within 5 % of the plan's."""
    first, second = run_ranks(alive, names, count=2)
    for name, (one, planned) in first.items():
        assert max(one, second[name][0]) == pytest.approx(planned, rel=0.05), name


def test_the_plan_counts_a_velocity_and_corrected_weights() -> None:
    check([("pipemare", None)])


@pytest.mark.slow
def test_the_plan_counts_versions_velocities_and_late_sums() -> None:
    check([*SCHEDULES])

"""Predicted seconds of updates that multiply matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

WIDTH, LAYERS, ITERATIONS = 1024, 2, 5
PEAK = 312e12  # FLOP/s of an A100 in bf16


class Pair(nn.Module):
    """A wide and a tall matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def predicted(devices: int, optimizer: Any) -> dict[str, float]:
    """Predicted figures of a step."""
    batch = {"x": torch.empty(64, WIDTH)}
    plan = autopar.plan(
        Pair(), f"A100-80: gpu={devices}", example_inputs=batch, optimizer=optimizer, state="ddp"
    )
    return plan.stage.predicted.figures()


@pytest.mark.slow
def test_the_products_of_muon_are_priced_on_any_number_of_devices() -> None:
    """X X^T, A A and A X, five times for each matrix of s = 1024 and l = 4096."""
    short, long = WIDTH, 4 * WIDTH
    flops = LAYERS * ITERATIONS * 2 * (2 * short**2 * long + short**3)
    one, two = (predicted(devices, autopar.muon(lr=0.1)) for devices in (1, 2))
    assert flops / PEAK < one["update_seconds"] < 3 * flops / PEAK
    assert two["update_seconds"] == pytest.approx(one["update_seconds"] / 2, rel=0.05)
    other = predicted(1, torch.optim.AdamW)
    assert one["step_seconds"] - one["update_seconds"] == pytest.approx(
        other["step_seconds"] - other["update_seconds"]
    )

"""Memory limits that no plan meets: the error says how much is missing, and suggests remedies."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, OptionError
from autopar.planning import planner
from autopar.planning.trace import Trace
from tests.support.refusals import planned, refused


class Perceptron(nn.Module):
    """A residual perceptron, whose plans on three axes differ most in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.out(torch.relu(self.into(x)))).square().mean()


def quantity(text: str) -> float:
    """Bytes of "1.5 MiB"."""
    number, unit = text.split()
    return float(number) * 1024.0 ** ("B", "KiB", "MiB", "GiB").index(unit)


def test_memory_that_no_plan_meets_is_said_to_be_how_much_too_little() -> None:
    error = refused(InfeasibleError, lambda: planned(memory=4096))
    assert "4 KiB" in error.what
    found = re.search(r"needs (.*?), (.*?) more; largest: (.*)", error.why)
    assert found is not None
    need, more = quantity(found[1]), quantity(found[2])
    assert need - more == pytest.approx(4096, rel=0.02)
    assert "layers_1_weight" in found[3]  # 32 x 32, the largest
    assert error.todo
    # With what it says is needed, there is a plan, and with less there is none.
    assert planned(memory=1.01 * need).predicted.peak_bytes <= 1.01 * need
    refused(InfeasibleError, lambda: planned(memory=0.97 * need))


def test_what_would_help_is_said_with_its_price() -> None:
    fixed = {"state": "ddp", "pins": autopar.pins.data_parallel()}
    least = planned(**fixed).predicted.peak_bytes
    error = refused(InfeasibleError, lambda: planned(memory=0.9 * least, **fixed))
    found = re.search(r"state=None \((.*?) (\w+) a step\)", error.todo)
    assert found is not None, error.todo
    plan = planned(memory=0.9 * least, pins=fixed["pins"])  # as it is told
    assert plan.predicted.peak_bytes <= 0.9 * least
    seconds = float(found[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found[2]]
    assert seconds == pytest.approx(plan.predicted.step_seconds, rel=0.01)


def test_no_memory_at_all_is_too_little() -> None:
    assert refused(InfeasibleError, lambda: planned(memory=0.0)).todo


@pytest.mark.parametrize("memory", [math.nan, -1.0])
def test_memory_that_is_no_size_is_refused(memory: float) -> None:
    assert str(memory) in refused(OptionError, lambda: planned(memory=memory)).what


def test_on_three_axes_all_choices_are_searched_before_anything_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Trace, "tell", lambda self, doing: told.append(doing))

    def plan() -> autopar.Plan:
        return autopar.plan(
            Perceptron(), "H100: d=2, r=3, c=4", example_inputs={"x": torch.empty(128, 256)},
            memory=727_000.0,
        )  # fmt: skip

    assert plan().predicted.peak_bytes <= 727_000
    assert any("all layouts of three axes" in doing for doing in told)
    assert {doing.split()[0] for doing in told} >= {"strategies", "solve"}
    monkeypatch.setattr(planner, "can_be_complete", lambda mesh: False)
    monkeypatch.setattr(planner, "with_remedies", lambda planned, *given: planned(*given))
    with pytest.raises(InfeasibleError):
        plan()

"""Attributes that a model sets in each call are states only if the next call reads them first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.errors import CaptureError
from autopar.operators.interpret import run
from tests.capture.test_capture import values_of


class Fitted(nn.Module):
    """Fits its window to the size of a batch, as transformers' Swin does."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.layer, self.window, self.early = nn.Linear(4, 4), 7, early

    def forward(self, x: Tensor) -> Tensor:
        before = self.window
        self.window = min(self.window, x.shape[-1])
        scaled: Tensor = self.layer(x) * (before if self.early else self.window)
        return scaled


def test_a_number_that_each_call_sets_again_is_no_state() -> None:
    model, x = Fitted(early=False), torch.randn(2, 4)
    captured = capture(model, (x,))
    assert model.window == 7
    (output,) = run(captured.graph, values_of(captured, model, {"x": x})).values()
    torch.testing.assert_close(output, model.layer(x) * 4)
    with pytest.raises(CaptureError, match=r"changes self.window"):  # the second call differs
        capture(Fitted(early=True), (x,))


class Remembers(nn.Module):
    """Keeps a table, its last result, and perhaps a sum over calls in attributes that were None."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.layer, self.adds = nn.Linear(4, 4), adds
        self.table: Tensor | None = None
        self.last: Tensor | None = None
        self.total: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        self.last = self.layer(x + self.table)
        if self.adds:
            self.total = self.last if self.total is None else self.total + self.last
        return self.last if self.total is None else self.total


def test_a_tensor_that_the_next_call_reads_and_sets_is_a_state() -> None:
    x = torch.randn(2, 4)
    model = Remembers(adds=False)
    captured = capture(model, (x,))
    assert model.table is model.last is None
    (output,) = run(captured.graph, values_of(captured, model, {"x": x})).values()
    torch.testing.assert_close(output, model(x))
    with pytest.raises(CaptureError, match=r"changes self.total"):
        capture(Remembers(adds=True), (x,))

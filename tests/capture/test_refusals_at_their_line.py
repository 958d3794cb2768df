"""Models that cannot be captured are refused at the line that the user wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.errors import BatchError, CaptureError
from tests.support import models


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


class Branches(Bad):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line
            return x
        return -x


class TakesItem(Bad):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.max().item()  # the line
        return x / scale


class Selects(Bad):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].std()  # the line


class WrongShape(Bad):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(3, 3)  # the line


class WritesWeight(Bad):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)  # the line
        return x @ self.weight


class WritesUnseen(Bad):
    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        with torch.no_grad():
            x[0].clamp_(-1, 1)  # the line
        return x


class WritesOut(Bad):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(4)
        torch.cat([x[0], x[1]], out=out)  # the line
        return out


class Strides(Bad):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x.as_strided((2, 2), (3, 1)).zero_()  # the line
        return x


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (Branches, "torch.where"),
        (TakesItem, "keep it a tensor"),
        (Selects, "torch.where"),
        (WrongShape, "runs"),
        (WritesWeight, "clone"),
        (WritesUnseen, "clone"),
        (WritesOut, "out="),
        (Strides, "new tensor"),
    ],
)
def test_what_cannot_be_captured_is_refused_at_the_user_s_line(
    model: type[Bad], advice: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model(), (torch.randn(4, 4),))
    assert advice in caught.value.todo
    assert f"{Path(__file__).name}:" in caught.value.where
    assert "# the line" in caught.value.where


def test_an_input_must_not_have_a_parameter_s_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.x

    with pytest.raises(CaptureError, match="'x'"):
        capture(Model(), (torch.ones(3),))


def test_parameters_belong_into_the_model_not_into_the_loss() -> None:
    model, batch = models.mlp(sizes=(8, 8))
    head = nn.Linear(8, 1)
    with pytest.raises(CaptureError, match="loss_fn"):
        capture(model, (), batch, loss_fn=HeadLoss(head))


class HeadLoss(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, output: Tensor, x: Tensor) -> Tensor:
        loss: Tensor = F.relu(self.head(output)).sum()
        return loss


def test_a_batch_that_the_model_does_not_take_is_refused() -> None:
    model, batch = models.mlp()
    with pytest.raises(BatchError, match="does not take"):
        capture(model, (), {**batch, "labels": torch.zeros(1)})

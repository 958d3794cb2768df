"""Checkpoints contain buffers and unused parameters that a model's state_dict leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import StateError
from tests.runtime.checkpoint.test_checkpoint import BATCH, SINGLE, loss_of, trained
from tests.support.models import Mlp


class Running(nn.Module):
    """Has a parameter that nothing uses, and a running mean that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp((8, 5, 3))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.mean(0)
        return loss_of(self.net(x - self.mean))


def running(seed: int, device: str = "cpu") -> tuple[nn.Module, autopar.Session]:
    torch.manual_seed(seed)
    with torch.device(device):
        model = Running()
    return model, autopar.compile(model, SINGLE, example_inputs={"x": BATCH})


def test_what_a_state_dict_leaves_out_goes_on_too(tmp_path: Path) -> None:
    _, program = running(0)
    trained(program)
    program.save_checkpoint(tmp_path / "one")
    losses = trained(program)
    model, other = running(1)
    trained(other, 1)
    other.load_checkpoint(tmp_path / "one")
    assert trained(other) == losses
    assert "mean" not in autopar.load_checkpoint(tmp_path / "one")
    other.load_weights(model.state_dict())  # with the unused one
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)
    _, hollow = running(2, "meta")
    with pytest.raises(StateError, match="no value of mean"):
        hollow.load_weights(model.state_dict())
    hollow.load_checkpoint(tmp_path / "one")
    assert trained(hollow) == losses

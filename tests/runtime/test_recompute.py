"""Blocks that are recomputed in the backward, and buffers that a step writes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import autopar

STEPS = 3
SGD = partial(torch.optim.SGD, lr=0.1)


class Centred(nn.Module):
    """A residual block that reads a running mean, writes it, and reads what it wrote."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("mean", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x)) * scale + self.mean.clone()
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * h.mean(0))
        return x + torch.tanh(self.norm(h) - self.mean.clone())


class Counted(nn.Module):
    """Blocks that read a buffer of their parent's, which is written behind them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Centred(width) for _ in range(3))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.clone()
        for block in self.blocks:
            x = block(x, scale)
        self.scale.mul_(1.5)
        return x.square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("how", ["none", "full 2", "selective"])
def test_buffers_are_read_as_they_were_and_written_once(how: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model = Counted().double()
    plain, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.float64)
    program = autopar.compile(
        model,
        "cpu: gpu=1",
        optimizer=SGD,
        example_inputs={"x": x},
        recompute=how,
        microbatches=microbatches,
    )
    updates = SGD(plain.parameters())
    for _ in range(STEPS):
        updates.zero_grad()
        losses = [plain(part) / microbatches for part in x.chunk(microbatches)]
        sum(losses).backward()
        updates.step()
        assert program.step(x=x).item() == pytest.approx(sum(losses).item(), rel=1e-12)
    assert ("repeatable(" in program.source) == (how != "none")
    found = program.state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)

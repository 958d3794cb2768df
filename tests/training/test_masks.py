"""Random numbers of whole models: on the CPU those of one process, for any mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.support.ranks import run_ranks

STEPS, TOLERANCE = 2, 1e-9
MESHES = (
    "cpu[1GFLOP/s 64GiB 1GB/s]: x=4 @10GB/s 1us",
    "cpu[1GFLOP/s 64GiB 1GB/s]: x=2 @10GB/s 1us, y=2 @10GB/s 1us",
)
sgd = partial(torch.optim.SGD, lr=0.1)


class Encoder(nn.Module):
    """Attention of torch, which works on (row, batch), so that dropout sees transposed memory."""

    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, 16, 4, 32, dropout=0.1, batch_first=True)
        self.layers, self.norm = nn.ModuleList(layer() for _ in range(2)), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x.flatten(0, 1)).tanh().sum()


class Transposed(nn.Module):
    """Draws random numbers between layouts that all_to_alls change."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Linear(16, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.columns(self.rows(x).transpose(1, 2)).permute(2, 0, 1), 0.3)
        y = F.alpha_dropout(y.transpose(0, 2), 0.2, training=True)
        return (y * (torch.rand_like(y) < 0.7) + torch.randint_like(y, 5)).logsumexp(1).sum()


class Images(nn.Module):
    """Dropout where channels are innermost in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 4)).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        x = F.dropout2d(F.dropout(self.conv(x), 0.2), 0.2)
        return self.head(F.dropout(x.flatten(2).mT, 0.2, inplace=True)).logsumexp(-1).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "transposed": Transposed,
    "images": Images,
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]().double(), torch.randn(8, 8, 16, dtype=torch.float64)


def whole(name: str, microbatches: int = 1) -> list[Tensor]:
    """Losses and final parameters in one process."""
    model, x = make(name)
    updates, losses = sgd(model.parameters()), []
    torch.manual_seed(1)
    for _ in range(STEPS):
        updates.zero_grad()
        parts = [model(part) for part in x.chunk(microbatches)]  # sums, which add up
        for part in parts:
            part.backward()
        updates.step()
        losses.append(torch.stack(parts).sum())
    return [*losses, *model.state_dict().values()]


def sharded(name: str, mesh: str, microbatches: int) -> list[Tensor]:
    model, x = make(name)
    program = autopar.compile(
        model, mesh, optimizer=sgd, example_inputs={"x": x}, microbatches=microbatches
    )
    torch.manual_seed(1)
    losses = [program.step(x=x) for _ in range(STEPS)]
    return [*losses, *program.state_dict().values()]


Case = tuple[str, str, int]
QUICK: list[Case] = [
    ("encoder", MESHES[1], 1),
    ("images", MESHES[0], 1),
    ("transposed", MESHES[1], 4),
]
OTHERS: list[Case] = [
    *((name, mesh, 1) for name in MODELS for mesh in MESHES if (name, mesh, 1) not in QUICK),
    ("encoder", MESHES[0], 2),
]


def on_rank(cases: list[Case]) -> list[list[Tensor]]:
    return [sharded(*case) for case in cases]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_a_sharded_run_draws_what_one_process_draws(cases: list[Case]) -> None:
    for found in run_ranks(on_rank, cases):
        for (name, mesh, microbatches), tensors in zip(cases, found, strict=True):
            for got, want in zip(tensors, whole(name, microbatches), strict=True):
                torch.testing.assert_close(
                    got, want, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name} on {mesh}"
                )

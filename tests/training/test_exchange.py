"""Training with a split vocabulary and with split images equals unsharded training."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

# Links on which only bytes count: even small logits are worth leaving where they are.
MESH = "toy[1GFLOP/s 64GiB 1GB/s]: x=4 @1GB/s 1ns"
WORDS, HIDDEN = 211, 8
OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Made = tuple[nn.Module, dict[str, Tensor], dict[str, str]]


class Tied(nn.Module):
    """The table of words is the head's weight, too; some labels are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN, padding_idx=3)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens)).tanh()
        logits = F.linear(h, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class Image(nn.Module):
    """Windows that overlap, a stride, pooling, and back to the first size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 5, padding=2)
        self.down = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        h = F.relu(self.stem(image))
        h = h + self.up(F.max_pool2d(F.relu(self.down(h)), 3, 1, 1))
        pooled = F.adaptive_avg_pool2d(F.max_pool2d(h, 3, 2, 1), 1)
        return F.cross_entropy(self.head(pooled.flatten(1)), labels)


def words() -> Made:
    tokens, labels = torch.randint(0, WORDS, (2, 2, 6), generator=torch.manual_seed(1))
    labels[0, 2] = -100
    table = f"[{WORDS}@x, {HIDDEN}]"
    pins = {
        "embed.weight": f"{table} => {table}",
        "embedding": f"[2, 6, {HIDDEN}] +sum(x)",
        "linear": f"[2, 6, {WORDS}@x]",
    }
    return Tied(), {"tokens": tokens, "labels": labels}, pins


def images() -> Made:
    image = torch.randn(2, 3, 16, 4, dtype=torch.float64, generator=torch.manual_seed(1))
    labels = torch.tensor([1, 4])
    pins = {"conv2d": "[2, 6, 16@x, 4]", "conv2d_1": "[2, 8, 8@x, 2]", "relu_1": "[2, 8, 8@x, 2]"}
    pins |= {"max_pool2d": "[2, 8, 8@x, 2]", "max_pool2d_1": "[2, 6, 8@x, 2]"}
    return Image(), {"image": image, "labels": labels}, pins


MODELS: dict[str, Callable[[], Made]] = {"words": words, "images": images}
# What their programs must call, forwards; gathering logits or pixels would be none of it.
CALLED = {
    "words": {"embedding": 1, "cross_entropy": 1},
    "images": {"halo": 4},
}


def made(name: str) -> Made:
    torch.manual_seed(0)
    model, batch, pins = MODELS[name]()
    return model.double(), batch, pins


def on_rank() -> dict[str, Any]:
    found = {}
    for name in MODELS:
        model, batch, pins = made(name)
        program = autopar.compile(model, MESH, optimizer=OPTIMIZER, pins=pins)
        losses = [program.step(**batch).item() for _ in range(4)]
        found[name] = losses, program.state_dict(), program.source
    return found


def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, batch, _ = made(name)
    losses = train_plainly(lambda: model(**batch), OPTIMIZER(model.parameters()), 4)
    return losses, model.state_dict()


def test_training_equals_that_of_the_unsharded_model() -> None:
    ranks = run_ranks(on_rank)
    for name, expected in CALLED.items():
        losses, state = alone(name)
        for rank in ranks:
            found, parameters, source = rank[name]
            assert found == pytest.approx(losses, rel=1e-9)
            for key, value in state.items():
                torch.testing.assert_close(parameters[key], value, rtol=1e-9, atol=1e-12, msg=key)
            for method, count in expected.items():
                assert len(re.findall(rf"mesh\.{method}\(", source)) == count, source
            assert not re.search(r"all_gather\([^)]*\).*(211|, 16, 4)", source), source

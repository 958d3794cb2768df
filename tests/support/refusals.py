"""A small model, plans of it, and checks of errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

BATCH = {"x": torch.randn(8, 16)}


class Net(nn.Module):
    """A perceptron; processes that are spawned import this module, and no transformers with it."""

    def __init__(self, sizes: tuple[int, ...] = (16, 32, 32, 8)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


def refused(kind: type[AutoparError], call: Callable[[], Any]) -> AutoparError:
    """The error of just that kind that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value


def planned(mesh: str = "H100: gpu=4", **options: Any) -> autopar.Plan:
    given = {"example_inputs": BATCH, "loss_fn": squared, **options}
    return autopar.plan(Net(), mesh, **given)

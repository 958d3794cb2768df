"""Operators along a split dimension, on four gloo ranks, against the whole dimension.

The rules' proofs run them on threads; these tests run their communication between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime.communication.communicator import Communicator
from tests.support.ranks import run_ranks

MESH = Mesh.parse("cpu: node=2, gpu=2")
AXES = (("gpu",), ("node", "gpu"), ("gpu", "node"))
CLASSES, ROWS = 11, 6
LENGTHS = (8, 11)
LABELS = torch.tensor([0, 10, -100, 5, 3, 9])
Apply = Callable[[Tensor], Tensor]


def whole() -> dict[str, Apply]:
    """What torch computes on a matrix [ROWS, CLASSES]."""
    return {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "logsumexp": lambda x: x.logsumexp((1,)),
        "amax": lambda x: x.amax((1,)),
        "argmax": lambda x: x.argmax(1),
        "max": lambda x: x.max(1)[0],
        "gather": lambda x: x.gather(1, LABELS.clamp(0).view(-1, 1)),
        "embedding": lambda x: F.embedding(LABELS.clamp(0), x.T),
        "nll_loss": lambda x: F.nll_loss(x, LABELS, reduction="sum"),
        "cross_entropy": lambda x: F.cross_entropy(
            x, LABELS, reduction="none", label_smoothing=0.1
        ),
    }


def parts(mesh: Communicator, axis: tuple[str, ...]) -> dict[str, Apply]:
    """The same on columns of it, whose results are split, summed or whole."""
    more = {"axis": axis, "size": CLASSES}
    return {
        "softmax": lambda x: mesh.softmax(x, 1, axis=axis),
        "log_softmax": lambda x: mesh.log_softmax(x, 1, axis=axis),
        "logsumexp": lambda x: mesh.logsumexp(x, (1,), axis=axis),
        "amax": lambda x: mesh.amax(x, (1,), axis=axis),
        "argmax": lambda x: mesh.argmax(x, 1, **more),
        "max": lambda x: mesh.max(x, 1, **more)[0],
        "gather": lambda x: mesh.gather(x, 1, LABELS.clamp(0).view(-1, 1), **more),
        "embedding": lambda x: mesh.embedding(x.T, LABELS.clamp(0), **more),
        "nll_loss": lambda x: mesh.nll_loss(x, LABELS, reduction="sum", **more),
        "cross_entropy": lambda x: mesh.cross_entropy(
            x, LABELS, reduction="none", label_smoothing=0.1, **more
        ),
    }


SPLIT, SUMMED = ("softmax", "log_softmax"), ("gather", "embedding", "nll_loss")


def matrix() -> Tensor:
    value = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.manual_seed(0))
    value[1] = 0.5  # ties
    return value


def gradient(y: Tensor) -> Tensor:
    return torch.randn(y.shape, dtype=y.dtype, generator=torch.manual_seed(1))


def operators_on_rank(mesh: Communicator) -> list[tuple[str, Tensor, Tensor | None]]:
    """Results and gradients of every operator, put together again."""
    found = []
    for axis in AXES:
        group = mesh.group(axis)
        start, length = group.own(CLASSES)
        for name, apply in parts(mesh, axis).items():
            x = matrix()[:, start : start + length].clone().requires_grad_()
            y = apply(x)
            result = y.detach()
            if name in SPLIT:
                result = group.gather(result, 1, CLASSES)
            if name in SUMMED:
                result = group.reduce(result)
            grad = None
            if y.requires_grad:
                owed = gradient(result)
                y.backward(owed[:, start : start + length] if name in SPLIT else owed)
                assert x.grad is not None
                grad = group.gather(x.grad, 1, CLASSES)
            found.append((f"{name} over {axis}", result, grad))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[OnRank]:
    """What four ranks find, in one start of them."""
    return run_ranks(on_rank)


def test_parts_compute_what_the_whole_does(ranks: list[OnRank]) -> None:
    found = [rank.operators for rank in ranks]
    for place, (label, _, _) in enumerate(found[0]):
        name = label.partition(" ")[0]
        x = matrix().requires_grad_()
        y = whole()[name](x)
        if y.requires_grad:
            y.backward(gradient(y))
        for rank in found:
            _, result, grad = rank[place]
            torch.testing.assert_close(result, y.detach(), rtol=1e-12, atol=1e-12, msg=label)
            torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12, msg=label)


def borders_on_rank(mesh: Communicator, length: int) -> list[tuple[Tensor, Tensor]]:
    """A convolution of a line in parts: results and gradients put together again."""
    found = []
    for axis in AXES:
        group = mesh.group(axis)
        start, own = group.own(length)
        x = line(length)[..., start : start + own].clone().requires_grad_()
        y = slid(mesh.halo(x, 2, 2, 2, axis=axis), 0)
        y.backward(gradient(line(length)[:, :1])[..., start : start + own])
        assert x.grad is not None
        found.append((group.gather(y.detach(), 2, length), group.gather(x.grad, 2, length)))
    return found


def line(length: int) -> Tensor:
    return torch.randn(1, 2, length, dtype=torch.float64, generator=torch.manual_seed(0))


def slid(x: Tensor, padding: int) -> Tensor:
    return F.conv1d(x, torch.linspace(-1, 1, 10).double().view(1, 2, 5), padding=padding)


@pytest.mark.parametrize("length", LENGTHS)
def test_borders_come_from_the_neighbours(length: int, ranks: list[OnRank]) -> None:
    x = line(length).requires_grad_()
    y = slid(x, 2)
    y.backward(gradient(line(length)[:, :1]))
    for rank in ranks:
        for result, grad in rank.borders[length]:
            torch.testing.assert_close(result, y.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12)


def refused_on_rank(mesh: Communicator) -> str:
    try:
        mesh.embedding(torch.ones(2, 3), torch.tensor([11]), axis="gpu", size=11)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_word_that_nobody_has_is_refused(ranks: list[OnRank]) -> None:
    assert all("out of range" in rank.refused for rank in ranks)


@dataclass(frozen=True)
class OnRank:
    """What one rank finds, for all tests of this file."""

    operators: list[tuple[str, Tensor, Tensor | None]]
    borders: dict[int, list[tuple[Tensor, Tensor]]]
    refused: str


def on_rank() -> OnRank:
    mesh = Communicator(MESH)
    borders = {length: borders_on_rank(mesh, length) for length in LENGTHS}
    return OnRank(operators_on_rank(mesh), borders, refused_on_rank(mesh))

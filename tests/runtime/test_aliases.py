"""One value as several operands of an operator, in different layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.pins import PinFunction
from tests.support.ranks import run_ranks

FAST, SLOW = "cpu: x=4", "cpu[1GFLOP/s 64GiB 1GB/s]: x=4 @10GB/s 1us"
STEPS, TOLERANCE = 2, 1e-12


class Product(nn.Module):
    """A loss of the products of all rows of one linear's result, twice its own weight."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.loss = nn.Linear(16, 32).double(), loss

    def forward(self, x: Tensor) -> Tensor:
        rows = self.fc(x)
        return self.loss(F.linear(rows, rows))


class Function(nn.Module):
    """The sum of sines of a function of one parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(shape, dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.function(self.w)).sum() + 0 * x.sum()


def log_sum(products: Tensor) -> Tensor:
    return torch.logsumexp(products, -1).mean()


def diagonal(products: Tensor) -> Tensor:
    return F.cross_entropy(products, torch.arange(32))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    mesh: str = SLOW
    pins: PinFunction | Mapping[str, str] | None = None

    def train(self, compiled: bool) -> list[Tensor]:
        """Losses and final parameters, of a program or of plain torch."""
        torch.manual_seed(0)
        model, x = self.make(), torch.randn(32, 16, dtype=torch.float64)
        sgd = partial(torch.optim.SGD, lr=0.1)
        if compiled:
            batch = {"x": x}
            program = autopar.compile(
                model, self.mesh, optimizer=sgd, example_inputs=batch, pins=self.pins
            )
            losses = [program.step(**batch) for _ in range(STEPS)]
            return [*losses, *program.state_dict().values()]
        updates, losses = sgd(model.parameters()), []
        for _ in range(STEPS):
            updates.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            updates.step()
        return [*losses, *model.state_dict().values()]


def squared(w: Tensor) -> Tensor:
    h = torch.tanh(w)
    return torch.bmm(h, h)


CASES = {
    "data parallel": Case(partial(Product, log_sum), FAST, autopar.pins.data_parallel("x")),
    "fsdp": Case(partial(Product, log_sum), FAST, autopar.pins.fsdp("x")),
    "columns": Case(partial(Product, log_sum), FAST, {"fc": "[32, 32@x]"}),
    "free": Case(partial(Product, log_sum)),
    "cross entropy": Case(partial(Product, diagonal), FAST, autopar.pins.data_parallel("x")),
    "bmm": Case(partial(Function, squared, 4, 8, 8)),
    "transpose": Case(partial(Function, lambda w: w @ w.T, 32, 16)),
    "outer": Case(partial(Function, lambda w: torch.outer(w, w), 32)),
}


def trained() -> dict[str, list[Tensor]]:
    return {name: case.train(compiled=True) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Tensor]]]:
    return run_ranks(trained)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_reads_a_value_in_two_layouts(
    name: str, ranks: list[dict[str, list[Tensor]]]
) -> None:
    expected = CASES[name].train(compiled=False)
    for rank in ranks:
        for mine, its in zip(rank[name], expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=TOLERANCE, atol=TOLERANCE)

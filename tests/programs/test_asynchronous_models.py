"""Asynchronous pipelines of models and runs that are no chains of linear layers at one rate.

The reference runs the whole model in one process, a microbatch after the other, by torch's autograd
on the version of the weights that a closed form gives, for methods whose backward runs on the
weights of its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import autopar
from tests.support.ranks import run_ranks
from tests.support.stale_weights import (
    METHODS,
    OPTIMIZERS,
    WIDTH,
    mesh,
)

STEPS = 7
ROWS = 32  # of two rows, a batch norm would leave rounding errors as gradients
METHODS_OF_ONE_VERSION = ("2bw", "pipedream")


class Blocks(nn.Module):
    """Blocks of a linear map, a batch norm, and a dropout.

    A bias before a batch norm has no gradient but rounding errors, which AdamW would magnify.
    """

    def __init__(self, blocks: int = 4, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(blocks))
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.dropout(torch.tanh(norm(layer(x))))
        return F.mse_loss(x, y)


def tied() -> Blocks:
    """One weight in the first, third and last of five blocks."""
    model = Blocks(5)
    for at in (2, 4):
        model.layers[at].weight = model.layers[0].weight
    return model


def frozen(*names: str) -> Blocks:
    """Parameters whose names begin so do not train."""
    model = Blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


def half(step: int) -> float:
    """A learning rate that changes in every step."""
    return 0.02 / (1 + step)


@dataclass(frozen=True)
class Case:
    """A model and the way in which it is trained.

    Attributes:
        model: makes it.
        stages: of the pipeline.
        methods: of `METHODS`.
        rate: step -> learning rate.
        evaluated: steps before which the model is evaluated, which drains the pipeline.
    """

    model: Callable[[], Blocks]
    stages: int = 2
    methods: tuple[str, ...] = METHODS_OF_ONE_VERSION
    rate: Callable[[int], float] | None = None
    evaluated: tuple[int, ...] = ()


CASES = {
    "batch norms": Case(Blocks),
    "dropout": Case(lambda: Blocks(p=0.3), methods=(*METHODS_OF_ONE_VERSION, "bounded")),
    "tied in all stages": Case(tied, 2, ("2bw", "vertical", "bounded")),
    "frozen in both stages": Case(lambda: frozen("layers.0", "norms.3", "norms.2.bias")),
    "a frozen stage": Case(lambda: frozen("layers.0", "layers.1", "norms.0", "norms.1")),
    "a rate that changes": Case(Blocks, rate=half),
    "evaluated": Case(lambda: Blocks(p=0.1), methods=("2bw",), rate=half, evaluated=(1, 4)),
}  # fmt: skip
MANY = {
    "tied in three stages": Case(tied, 3, ("2bw", "vertical", "bounded"), half, (3,)),
    "everything": Case(lambda: Blocks(6, 0.2), 3, ("2bw", "vertical", "few"), half, (5,)),
}  # fmt: skip


def given(case: Case) -> tuple[Blocks, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = case.model().double()
    rows = [
        {name: torch.randn(ROWS, WIDTH, dtype=torch.float64) for name in "xy"} for _ in range(STEPS)
    ]
    return model, rows


def trained(names: list[str]) -> dict[tuple[str, str, str], Any]:
    """Losses of evaluations, weights and buffers, and the stages of all parameters."""
    found = {}
    for name in names:
        case = {**CASES, **MANY}[name]
        for method in case.methods:
            for optimizer in ("momentum", "adamw"):
                model, batches = given(case)
                program = autopar.compile(
                    model, mesh(case.stages), example_inputs=batches[0], stages=case.stages,
                    microbatches=METHODS[method].microbatches, optimizer=OPTIMIZERS[optimizer],
                    schedule=METHODS[method].schedule, allow="stale gradients",
                )  # fmt: skip
                torch.manual_seed(1)
                told = []
                for step, batch in enumerate(batches):
                    if step in case.evaluated:
                        model.eval()
                        told.append(float(program(**batch)))
                        model.train()
                    if case.rate is not None:
                        for group in program.optimizer.param_groups:
                            group["lr"] = case.rate(step)
                    program.step(**batch)
                held = {
                    key: number
                    for (number, _), stage in program._executor.everywhere.items()
                    for key in stage.state.names
                }
                found[name, method, optimizer] = told, program.state_dict(), held
                program.close()
    return found


def simulated_by_autograd(
    case: Case, method: str, optimizer: str, held: dict[str, int]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of evaluations, and the state after all steps.

    Args:
        case, method, optimizer: what is trained.
        held: the stage of each parameter.
    """
    model, batches = given(case)
    torch.manual_seed(1)
    chosen, told = METHODS[method], list[float]()
    n, parameters = chosen.microbatches, dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    steps = OPTIMIZERS[optimizer](trained.values())
    versions = [{name: p.detach().clone() for name, p in parameters.items()}]
    begun, first = 0, 0  # microbatch and version with which the pipeline was filled last
    for step, batch in enumerate(batches):
        if step in case.evaluated:
            begun, first = step * n, len(versions) - 1
            told.append(model.eval()(**batch).item())
            model.train()
        if case.rate is not None:
            steps.param_groups[0]["lr"] = case.rate(step)
        for number in range(n):
            age = {
                name: first + chosen.forward(held[name], case.stages, step * n + number - begun)
                for name in parameters
            }
            used = {name: versions[age[name]][name].clone() for name in parameters}
            for name in trained:
                used[name].requires_grad_()
            parts = {name: value.chunk(n)[number] for name, value in batch.items()}
            loss = functional_call(model, used, kwargs=parts) / chosen.taken
            gradients = torch.autograd.grad(loss, [used[name] for name in trained])
            for parameter, own in zip(trained.values(), gradients, strict=True):
                parameter.grad = own if parameter.grad is None else parameter.grad + own
            if (number + 1) % chosen.taken == 0:
                steps.step()
                steps.zero_grad()
                versions.append({name: p.detach().clone() for name, p in parameters.items()})
    return told, model.state_dict()


def check(names: list[str], ranks: int) -> None:
    every = run_ranks(trained, names, count=ranks)
    wrong = []
    for key, (_, _, held) in every[0].items():
        name, method, optimizer = key
        told, state = simulated_by_autograd({**CASES, **MANY}[name], method, optimizer, held)
        for rank in every:
            assert rank[key][0] == pytest.approx(told, abs=1e-12), key
            error = max(float((rank[key][1][k] - v).abs().max()) for k, v in state.items())
            if not error < 1e-12:
                wrong.append(f"{' '.join(key)}: off by {error:.2g}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_a_scheduler_dropout_and_evaluations_train_as_in_one_process() -> None:
    check(["evaluated"], 2)


@pytest.mark.slow
def test_models_of_any_kind_train_as_one_process_does() -> None:
    """Buffers, dropout, frozen and shared parameters, and rates that change."""
    check([*CASES], 2)


@pytest.mark.slow
def test_models_of_any_kind_train_in_three_stages() -> None:
    check([*MANY], 3)

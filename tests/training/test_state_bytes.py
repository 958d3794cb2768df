"""Bytes of optimizer state that ranks hold, against those that the plan and its simulation say."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.model import AnalyticModel
from autopar.explain.summary import parameters
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import works
from autopar.pins import data_parallel
from autopar.simulate import settings_on, tasks
from tests.support.ranks import run_ranks

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adafactor": torch.optim.Adafactor,
    "muon": autopar.muon(),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 with masters": {"precision": "bf16"},
    "an average": {"ema": 0.99},
    "both on the host": {"precision": "bf16", "ema": 0.99, "offload": "optimizer"},
}


class Deep(nn.Module):
    """Twelve matrices of four sizes, which can be dealt out evenly, and vectors beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 48)
        self.up = nn.ModuleList(nn.Linear(48, 96) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(96, 48) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(torch.tanh(up(h)))
        return h.float().square().mean()


def _held(program: Any) -> tuple[int, int]:
    """Returns the bytes of states, averages and masters on the device, and in host memory."""
    update, weights = program._executor.update, program._executor.weights
    tensors = [
        value
        for state in update.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    tensors += update.averages.values()
    masters = [w.updated for w in weights.all if w.has_master]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if update.away is None:
        return nbytes + sum(master.nbytes for master in masters), 0
    return 0, nbytes + sum(update.away.masters[id(master)].nbytes for master in masters)


def _said(program: Any) -> tuple[float, float, float]:
    """Returns what the plan's table says, on the device and in host memory, and the simulation."""
    graph, plan = program.graph, program.plan.stage
    rows = parameters(graph, plan, ())
    model = AnalyticModel(plan.mesh)
    first = tasks(graph, plan, works(graph, plan, table()), model, settings_on("cpu"))[0]
    simulated = sum(n for name, n in first.allocates if name.startswith("optimizer"))
    return sum(r.optimizer for r in rows), sum(r.host for r in rows), simulated


def _bytes(mesh: str, name: str, states: tuple[str, ...]) -> dict[Any, Any]:
    found = {}
    for state in states:
        for way, options in WAYS.items():
            torch.manual_seed(0)
            batch = {"x": torch.randint(64, (4, 8))}
            program = autopar.compile(
                Deep(), mesh, optimizer=OPTIMIZERS[name], state=state, pins=[data_parallel()],
                **options,
            )  # fmt: skip
            for _ in range(2):
                program.step(**batch)
            found[state, way] = _held(program), _said(program)
            program.close()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_says_the_bytes_that_ranks_hold(name: str) -> None:
    ranks = run_ranks(_bytes, "cpu: gpu=2", name, ("ddp", "zero1", "zero3"), count=2)
    for key, (_, (device, host, simulated)) in ranks[0].items():
        most, most_host = (max(rank[key][0][n] for rank in ranks) for n in (0, 1))
        assert most == pytest.approx(device, rel=0.05), key
        assert most == pytest.approx(simulated, rel=0.05), key
        assert most_host == pytest.approx(host, rel=0.05), key
        assert name == "sgd" or most + most_host > 0

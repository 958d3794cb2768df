"""Bytes of the states of an update that ranks hold, against those that the plan says."""

from __future__ import annotations

from collections import Counter
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
from autopar.ir.update import shared_states
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
    "masters": {"precision": "bf16"},
    "an average": {"ema": 0.99},
    "on the host": {"precision": "bf16", "ema": 0.99, "offload": "optimizer"},
    "messages": {"precision": "bf16 gradients=top-k 1 %"},
    "messages of low rank": {"precision": "gradients=powersgd rank 2"},
    "messages on the host": {"precision": "bf16 gradients=1-bit", "offload": "optimizer"},
    "a loss scale": {"precision": "fp16"},
}
FLAT = ("adamw", "zero1", {"fuse": ["adamw"]})
QUICK: list[tuple[str, str, dict[str, Any]]] = [
    ("adamw", "zero1", WAYS["on the host"]),
    ("adamw", "ddp", WAYS["messages"]),
    ("momentum", "zero3", WAYS["an average"]),
    ("adafactor", "zero1", WAYS["plain"]),
    ("muon", "zero1", WAYS["masters"]),
    ("sgd", "ddp", WAYS["a loss scale"]),
    FLAT,
]
Case = tuple[str, str, dict[str, Any]]


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


def _said(program: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Returns bytes that the plan says: by state, and in all by its table and by the simulation."""
    graph, plan = program.graph, program.plan.stage
    states: Counter[str] = Counter()
    for leaf in graph.leaves("param"):
        share = graph.template[graph.users[leaf.name][0]]
        for kept in plan.states(leaf, plan.storage(graph.template[leaf.name], share)):
            states[kept.state.name] += kept.nbytes  # type: ignore[assignment]
    for kept in shared_states(plan.precision):
        states[kept.state.name] += kept.nbytes  # type: ignore[assignment]
    rows, model = parameters(graph, plan, ()), AnalyticModel(plan.mesh)
    first = tasks(graph, plan, works(graph, plan, table()), model, settings_on("cpu"))[0]
    simulated = sum(n for name, n in first.allocates if name.startswith("optimizer"))
    device, host = sum(row.optimizer for row in rows), sum(row.host for row in rows)
    return dict(states), {"device": device, "host": host, "simulated": simulated}


def _bytes(mesh: str, cases: list[Case]) -> list[Any]:
    found = []
    for name, state, how in cases:
        torch.manual_seed(0)
        program = autopar.compile(
            Deep(), mesh, optimizer=OPTIMIZERS[name], state=state, pins=[data_parallel()], **how
        )
        for _ in range(2):
            program.step(x=torch.randint(64, (4, 8)))
        found.append((program.update_bytes(), *_said(program)))
        program.close()
    return found


def check(cases: list[Case]) -> None:
    """Every state by itself as the mean of ranks, and all of them on the rank with the most."""
    ranks = run_ranks(_bytes, "cpu: gpu=2", cases, count=2)
    for number, (name, _, how) in enumerate(cases):
        measured = [rank[number][0] for rank in ranks]
        _, states, sums = ranks[0][number]
        names = {state for rank in measured for state in rank}
        assert names == set(states), (name, how)
        for state in names:
            mean = sum(rank.get(state, 0) for rank in measured) / len(ranks)
            assert mean == pytest.approx(states[state], rel=0.05), (name, how, state)
        most = max(sum(rank.values()) for rank in measured)
        assert most == pytest.approx(sums["device"] + sums["host"], rel=0.05, abs=12), (name, how)
        assert most == pytest.approx(sums["simulated"] + sums["host"], rel=0.05, abs=12), (
            name,
            how,
        )
        assert ("offload" in how) == (sums["host"] > 0)


def test_a_plan_says_the_bytes_that_ranks_hold() -> None:
    check(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_says_the_bytes_of_every_instance(name: str) -> None:
    ways = [(name, state, how) for state in ("ddp", "zero1", "zero3") for how in WAYS.values()]
    check([*ways, FLAT])

"""Models of many families are planned, and train on four processes as on one."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import autopar
from autopar.capture.capture import Captured
from autopar.intra_op import legal
from autopar.intra_op.rule_table import table
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support.families import FAMILIES, make
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

# Slow devices on fast links: even small tensors are worth splitting.
SLOW = "toy[1GFLOP/s 64GiB 1GB/s]: "
LINE, GRID = f"{SLOW}gpu=4 @10GB/s 1us", f"{SLOW}data=2 @10GB/s 1us, tensor=2 @10GB/s 1us"
CLUSTER = "H100: node=2, gpu=8"
LEARNING_RATE, MOMENTUM, STEPS, TOLERANCE = 0.05, 0.9, 3, 1e-9
QUICK = ("t5", "dlrm")  # convolutions and mixtures train in tests of their own


@dataclass(frozen=True)
class Run:
    """What training leaves: the loss of every step and the state_dict."""

    losses: list[float]
    state: dict[str, Tensor]
    source: str = ""

    def errors(self, other: Run) -> tuple[float, float]:
        """The largest relative error of a loss, and of a tensor of the state.

        A tensor's error is relative to its norm, or to the norm of one step if that is larger.
        """
        pairs = zip(self.losses, other.losses, strict=True)
        loss = max(abs(mine - its) / abs(its) for mine, its in pairs)
        assert self.state.keys() == other.state.keys()
        worst = 0.0
        for name, its in other.state.items():
            scale = max(float(its.double().norm()), LEARNING_RATE * its.numel() ** 0.5)
            worst = max(worst, float((self.state[name] - its).double().norm()) / scale)
        return loss, worst


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Has no noise where gradients are zero but for rounding, as Adam has."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def train_whole(name: str) -> Run:
    """On one device, without autopar."""
    # Outside of a trace, grouped products are torch's own, which knows no float64.
    model, batch = make(name.removesuffix("_grouped"))

    def compute_loss() -> Tensor:
        output = model(**batch)
        return output if isinstance(output, Tensor) else output["loss"]

    updates = sgd([p for p in model.parameters() if p.requires_grad])
    torch.manual_seed(1)
    losses = train_plainly(compute_loss, updates, STEPS)
    return Run(losses, dict(model.state_dict()))


class Jobs:
    """Models, captured once for all ranks."""

    def __init__(self, names: list[str]) -> None:
        self.captured: dict[str, Captured] = {}
        for name in names:
            model, batch = make(name)
            self.captured[name] = capture_graph(model, (), batch, Options(), Trace(None))

    def train(self, mesh: str) -> dict[str, Run]:
        """The runs of this rank."""
        compiler = importlib.import_module("autopar.session.compiler")
        runs = {}
        for name, captured in self.captured.items():
            model, batch = make(name)
            with patch.object(compiler, "capture_parts", lambda *_, found=captured: found):
                program = autopar.compile(model, mesh, optimizer=sgd, example_inputs=batch)
            torch.manual_seed(1)
            losses = [program.step(**batch).item() for _ in range(STEPS)]
            runs[name] = Run(losses, program.state_dict(), program.source)
        return runs


def check(jobs: Jobs, mesh: str) -> None:
    """Trains the models in one process group, and checks each of them."""
    ranks = run_ranks(jobs.train, mesh)
    wrong = {}
    for name in ranks[0]:
        runs, whole = [rank[name] for rank in ranks], train_whole(name)
        error = max(max(run.errors(whole)) for run in runs)
        if not error <= TOLERANCE:
            wrong[name] = f"off by {error:.2g}"
        elif any(run.losses != runs[0].losses for run in runs):
            wrong[name] = "the ranks report different losses"
        elif not re.search(r"mesh\.(all_reduce|reduce_scatter|all_gather|slice)\(", runs[0].source):
            wrong[name] = "nothing is split"
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())


@pytest.fixture(scope="module")
def quick() -> Jobs:
    return Jobs(list(QUICK))


def judge_operators(jobs: Jobs) -> None:
    """Every operator has a rule; one without would be computed whole."""
    for name, captured in jobs.captured.items():
        used = {node.op for node in captured.graph.nodes if not node.is_leaf}
        assert used <= set(table()), name


def test_every_operator_has_a_rule(quick: Jobs) -> None:
    judge_operators(quick)


def test_training(quick: Jobs) -> None:
    check(quick, GRID)


@pytest.fixture(scope="module")
def full() -> Jobs:
    return Jobs(list(FAMILIES))


@pytest.mark.slow
def test_every_operator_of_all_models_has_a_rule(full: Jobs) -> None:
    judge_operators(full)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cluster_is_planned(full: Jobs, name: str) -> None:
    """On two levels of links; the plan is one that the rules allow."""
    options, graph = Options(), full.captured[name].graph
    plan = make_plan(graph, autopar.Mesh.parse(CLUSTER), options, Trace(None))
    legal.check(graph, plan, options.table)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_training_of_all(full: Jobs, mesh: str) -> None:
    check(full, mesh)

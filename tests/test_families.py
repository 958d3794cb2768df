"""Models of many families are planned, and train on four processes as they do on one."""

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
from autopar.intra_op.rules import rules
from autopar.ir.capture import Captured
from tests.families import FAMILIES, make
from tests.ranks import run_ranks

# Slow devices on fast links: even small tensors are worth splitting.
SLOW = "toy[1GFLOP/s 64GiB 1GB/s]: "
LINE, GRID = f"{SLOW}gpu=4 @10GB/s 1us", f"{SLOW}data=2 @10GB/s 1us, tensor=2 @10GB/s 1us"
CLUSTER = "H100: node=2, gpu=8"
LEARNING_RATE, MOMENTUM, STEPS, TOLERANCE = 0.05, 0.9, 3, 1e-9
QUICK = ("t5", "mixtral", "clip", "wide_resnet", "unet", "gshard")


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
    model, batch = make(name)
    optimizer, losses = sgd([p for p in model.parameters() if p.requires_grad]), []
    torch.manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, dict(model.state_dict()))


class Jobs:
    """Models, captured once for all ranks, each with its plans for some meshes."""

    def __init__(self, names: list[str], meshes: tuple[str, ...]) -> None:
        self.captured: dict[str, Captured] = {}
        self.plans: dict[tuple[str, str], autopar.Plan] = {}
        compiler = importlib.import_module("autopar.compile")
        options, nothing = compiler.Options(), compiler.Trace(None)
        for name in names:
            model, batch = make(name)
            self.captured[name] = compiler.capture_graph(model, (), batch, options, nothing)
            for mesh in meshes:
                self.plans[name, mesh] = compiler.make_plan(
                    self.captured[name].graph, autopar.Mesh.parse(mesh), options, nothing
                )

    def train(self) -> dict[tuple[str, str], Run]:
        """The runs of this rank."""
        compiler = importlib.import_module("autopar.compile")
        runs = {}
        for (name, mesh), plan in self.plans.items():
            model, batch = make(name)
            found = self.captured[name]
            with patch.object(compiler, "capture_graph", lambda *_, found=found: found):
                program = autopar.compile(
                    model, mesh, optimizer=sgd, plan=plan, example_inputs=batch
                )
            torch.manual_seed(1)
            losses = [program.step(**batch).item() for _ in range(STEPS)]
            runs[name, mesh] = Run(losses, program.state_dict(), program.source)
        return runs


def check(names: list[str], meshes: tuple[str, ...]) -> None:
    """Train the models in one process group, and judge every one of them."""
    whole = {name: train_whole(name) for name in names}
    ranks = run_ranks(Jobs(names, meshes).train)
    wrong = {}
    for name, mesh in ranks[0]:
        runs = [rank[name, mesh] for rank in ranks]
        error = max(max(run.errors(whole[name])) for run in runs)
        if not error <= TOLERANCE:
            wrong[name, mesh] = f"off by {error:.2g}"
        elif any(run.losses != runs[0].losses for run in runs):
            wrong[name, mesh] = "the ranks report different losses"
        elif not re.search(r"mesh\.(all_reduce|reduce_scatter|all_gather|slice)\(", runs[0].source):
            wrong[name, mesh] = "nothing is split"
    assert not wrong, "\n".join(f"{where}: {fault}" for where, fault in wrong.items())


def test_every_operator_has_a_rule() -> None:
    """Of all models; those without one would be computed whole."""
    table = set(rules())
    for name, captured in Jobs(list(FAMILIES), ()).captured.items():
        used = {node.op for node in captured.graph.nodes if not node.is_leaf}
        assert used <= table, name


def test_training() -> None:
    check(list(QUICK), (GRID,))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_training_of_all(mesh: str) -> None:
    check(list(FAMILIES), (mesh,))

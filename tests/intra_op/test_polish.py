"""Polishing changes how a plan reads, never its cost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import build
from autopar.intra_op.overlap_objective import weighted
from autopar.intra_op.polish import polish
from autopar.intra_op.problem import evaluate
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import prepare
from tests.support import models


@pytest.mark.parametrize("memory", [math.inf, 0.9])
def test_sums_move_to_the_parameters_at_no_price(memory: float) -> None:
    mesh = Mesh.parse("toy[1GFLOP/s 64GiB 1GB/s]: data=2 @10GB/s 1us, tensor=2 @10GB/s 1us")
    model, batch = models.gpt2()
    graph = prepare(capture(model, (), batch).graph)
    built = build(graph, mesh, AnalyticModel(mesh), rules())
    loose = evaluate(built.problem, solve(built.problem)).peak
    limited = build(graph, mesh, AnalyticModel(mesh), rules(), memory_limit=memory * loose)
    choice = solve(limited.problem).choice
    polished = polish(limited, choice)
    before, after = (evaluate(limited.problem, c) for c in (choice, polished))
    assert after.feasible
    assert after.cost == pytest.approx(before.cost, rel=1e-9)
    assert polish(limited, polished) == polished

    # With no limit, nothing is stored in parts that could as well be whole.
    if memory == math.inf:
        for node, options, index in zip(
            limited.problem.nodes, limited.options, polished, strict=True
        ):
            for other, option in enumerate(options):
                if option.storage is not None and not option.storage.axes("updated"):
                    dearer = node.cost[other] > node.cost[index]
                    alike = option.results == options[index].results
                    assert dearer or not alike or not options[index].storage.axes("updated")

    # Undone at every parameter, it is done again: no sum is left behind a parameter's line.
    undone = list(polished)
    for node, options in enumerate(limited.options):
        chosen = options[polished[node]]
        for index, option in enumerate(options):
            whole = option.stored == chosen.stored == option.results[0]
            # What is gathered is gathered there in the first place.
            whole &= option.results[0].dims == chosen.results[0].dims
            whole &= chosen.storage is None or not chosen.storage.axes("updated")
            if chosen.stored is not None and whole:
                undone[node] = index
    assert memory < math.inf or tuple(undone) != polished  # or all states are split
    assert polish(limited, tuple(undone)) == polished


class Wide(nn.Module):
    """Linears whose gradients take as long to send as a step to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linears(x).float().square().mean()


def test_a_polished_plan_takes_no_longer_beside_kernels() -> None:
    """Equal sums of seconds are not equal where a part of them is hidden."""
    mesh = Mesh.parse("A100-80: node=2, gpu=8")
    with torch.device("meta"):
        model, x = Wide().bfloat16(), torch.empty(8192, 8192, dtype=torch.bfloat16)
    graph = prepare(capture(model, (), {"x": x}).graph)
    given = Assumptions(slowdown=device(mesh).slowdown)
    built = build(graph, mesh, AnalyticModel(mesh), rules(), given)
    for weights in ((0.0, 1.0), (1.0, 1.0), (0.5, 0.5)):
        choice = solve(weighted(built, weights)).choice
        before, after = map(built.figures, (choice, polish(built, choice)))
        assert after.step_seconds <= before.step_seconds * (1 + 1e-9)

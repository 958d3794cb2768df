"""Parameters that are gathered again ahead of their backward, in plans within memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import build, layouts
from autopar.intra_op.built_problem import Built
from autopar.intra_op.overlap_objective import solve_side_by_side
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import evaluate
from autopar.intra_op.solvers import solve
from autopar.intra_op.storage_choices import bucket_of
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.plan_entries import Prediction
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.peak import with_simulated
from autopar.planning.planner import Planner
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan

MESH = Mesh.parse("H100: gpu=8")
WIDTH, BLOCKS, TOKENS = 1024, 4, 1 << 15
OPTIONS = Options(recompute="none")
REPLICATED = Layout(((), ()), (), ("gpu",))  # of a weight in use, its gradient in parts


class Stack(nn.Module):
    """Residual blocks with a weight each, replicated or split between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x.square().mean()


@dataclass(frozen=True)
class Case:
    """The stack with some blocks recomputed, its fastest plan, and how else it could be stored."""

    planner: Planner
    plan: StagePlan
    built: Built
    stored: tuple[tuple[int, ...], ...]

    def simulated(self, choice: tuple[int, ...]) -> Prediction:
        """Returns the figures of a choice, with its simulated peak."""
        graph = self.planner.graph
        nodes, predicted = layouts(self.built, graph, choice), self.built.figures(choice)
        plan = replace(self.plan, nodes=nodes, predicted=predicted)
        return with_simulated(graph, plan, OPTIONS.table, cost_model(MESH, OPTIONS)).predicted


@cache
def case(recompute: str) -> Case:
    """Returns the stack with these blocks recomputed."""
    with torch.device("meta"):
        model, x = Stack(), torch.empty(TOKENS, WIDTH)
    graph = capture_graph(model, (), {"x": x}, OPTIONS, Trace(None)).graph
    planner = Planner(graph, MESH, replace(OPTIONS, recompute=recompute), Trace(None))
    plan = planner.plan(1e15)
    given = Assumptions(OPTIONS.update, bucket=bucket_of(graph), recompute=plan.recompute)
    prices = Prices(MESH, cost_model(MESH, OPTIONS))
    built = build(graph, MESH, prices, OPTIONS.table, given, memory_limit=math.inf)
    fastest = solve_side_by_side(built, solve).choice
    rows = [
        [n for n, option in enumerate(options) if option.results == (REPLICATED,)]
        if options[chosen].storage is not None
        else [chosen]
        for options, chosen in zip(built.options, fastest, strict=True)
    ]
    return Case(planner, plan, built, tuple(product(*rows)))


@pytest.mark.parametrize("recompute", ["none", "full 1", "full 2"])
def test_every_way_to_store_parameters_has_the_memory_of_its_simulated_step(recompute: str) -> None:
    one = case(recompute)
    peaks = [one.simulated(choice).peak_bytes for choice in one.stored]
    counted = [evaluate(one.built.problem, choice).peak for choice in one.stored]
    assert counted == pytest.approx(peaks, rel=1e-9, abs=0.0)
    assert len(set(peaks)) >= 8


@pytest.mark.parametrize("recompute", ["none", "full 1", "full 2"])
def test_a_plan_within_memory_is_as_fast_as_the_fastest_that_fits(recompute: str) -> None:
    one = case(recompute)
    simulated = [one.simulated(choice) for choice in one.stored]
    for limit in {each.peak_bytes for each in simulated}:
        best = min(each.step_seconds for each in simulated if each.peak_bytes <= limit)
        plan = one.planner.plan(limit).predicted
        assert plan.peak_bytes <= limit
        assert plan.step_seconds <= best * (1 + 1e-6)

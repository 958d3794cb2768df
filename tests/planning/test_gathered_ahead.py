"""Parameters that are gathered again ahead of their backward, in plans within memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InfeasibleError
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import build, layouts
from autopar.intra_op.built_problem import Built
from autopar.intra_op.overlap_objective import solve_side_by_side
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import evaluate
from autopar.intra_op.solvers import solve
from autopar.intra_op.storage_choices import bucket_of
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.peak import with_simulated
from autopar.planning.planner import Planner
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.planning.within_memory import Fitted, fitting
from autopar.stage_plan import StagePlan

MESH = Mesh.parse("H100: gpu=8")
WIDTH, BLOCKS, TOKENS = 2048, 4, 1 << 14
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

    graph: Graph
    plan: StagePlan
    built: Built
    stored: tuple[tuple[int, ...], ...]

    def fitted(self, choice: tuple[int, ...]) -> Fitted:
        """Returns the plan of a choice with its peak, by the problem and simulated."""
        nodes, predicted = layouts(self.built, self.graph, choice), self.built.figures(choice)
        plan = replace(self.plan, nodes=nodes, predicted=predicted)
        plan = with_simulated(self.graph, plan, OPTIONS.table, cost_model(MESH, OPTIONS))
        return Fitted(plan, evaluate(self.built.problem, choice).peak, choice)


@cache
def case(recompute: str) -> Case:
    """Returns the stack with these blocks recomputed."""
    with torch.device("meta"):
        model, x = Stack(), torch.empty(TOKENS, WIDTH)
    graph = capture_graph(model, (), {"x": x}, OPTIONS, Trace(None)).graph
    plan = Planner(graph, MESH, replace(OPTIONS, recompute=recompute), Trace(None)).plan(1e15)
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
    return Case(graph, plan, built, tuple(product(*rows)))


@pytest.mark.parametrize("recompute", ["none", "full 1"])
def test_every_way_to_store_parameters_has_the_memory_of_its_simulated_step(recompute: str) -> None:
    ways = [case(recompute).fitted(choice) for choice in case(recompute).stored]
    peaks = [way.peak for way in ways]
    number = 4  # bytes of the loss, which only the simulation holds that long
    assert [way.counted for way in ways] == pytest.approx(peaks, rel=0.0, abs=number)
    assert len(set(peaks)) >= 8


@pytest.mark.parametrize("recompute", ["none", "full 1"])
def test_the_fastest_way_to_store_parameters_within_memory_is_planned(recompute: str) -> None:
    """Every solve is by brute force, so that only the memory may be wrong."""
    ways = [case(recompute).fitted(choice) for choice in case(recompute).stored]

    def seconds(way: Fitted) -> float:
        return way.plan.predicted.step_seconds

    def planned(allowed: float, before: Fitted | None) -> Fitted:
        within = [way for way in ways if way.counted <= allowed]
        if not within:
            raise InfeasibleError("no choice fits in memory")
        return min(within, key=seconds)

    for limit in {way.peak for way in ways}:
        plan = fitting(planned, case(recompute).built.problem, limit, searches=True)
        best = min((way for way in ways if way.peak <= limit), key=seconds)
        assert plan.predicted.peak_bytes <= limit
        assert plan.predicted.step_seconds == seconds(best)

"""Plans under another pin keep what is recomputed, and equal plans that are made independently."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from autopar.errors import InfeasibleError
from autopar.explain import decisions
from autopar.intra_op.build import Built, build
from autopar.intra_op.memory.lifetimes import lifetimes
from autopar.intra_op.price_cache import Prices
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import Resharder
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan, plan_again
from autopar.planning.prices import cost_model
from autopar.planning.recomputation import GAP
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan

MESH = Mesh.parse("cpu: gpu=2")
WEIGHT = "blocks.*.up.weight"


class Block(nn.Module):
    """A perceptron whose hidden values are much larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


class Model(nn.Module):
    """Equal blocks, of which some can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@functools.cache
def graph() -> Graph:
    return capture_graph(Model(), (), {"x": torch.zeros(512, 8)}, Options(), Trace(None)).graph


def made(options: Options) -> StagePlan:
    return make_plan(graph(), MESH, options, Trace(None))


@functools.cache
def free() -> StagePlan:
    return made(Options())


@functools.cache
def tight() -> StagePlan:
    """A plan that recomputes all blocks, with little more memory than it takes."""
    plan = made(Options(recompute="full"))
    return replace(plan, limit=1.02 * plan.predicted.peak_bytes)


def otherwise(plan: StagePlan) -> Options:
    """Options under which a weight is used in another layout than a plan's, recomputed or not."""
    used = next(one.layout for one in decisions(plan, graph()).values() if one.name == WEIGHT)
    pins = {WEIGHT: f"not {used.partition(' -sum(')[0]}"}
    return Options.like(plan, pins=pins, recompute="auto")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems that are built."""
    graphs = list[str]()

    def counted(graph: Graph, *given: Any, **options: Any) -> Built:
        graphs.append(graph.name)
        return build(graph, *given, **options)

    monkeypatch.setattr("autopar.planning.planner.build", counted)
    return graphs


def test_one_problem_is_built_with_the_same_blocks_recomputed(builds: list[str]) -> None:
    plan = tight()
    ((_, how),) = plan.recompute.items()
    options = otherwise(plan)
    builds.clear()
    again = plan_again(graph(), plan, options, Trace(None))
    assert len(builds) == 1
    alone = made(replace(options, recompute=str(how)))
    assert again.recompute == plan.recompute
    assert (again.nodes, again.predicted) == (alone.nodes, alone.predicted)
    assert again.nodes != plan.nodes
    assert again.predicted.step_seconds >= plan.predicted.step_seconds * (1 - GAP)


@pytest.mark.slow
def test_more_is_recomputed_if_nothing_fits_otherwise() -> None:
    nothing = replace(free(), limit=tight().limit)  # a plan that recomputes nothing
    options = otherwise(nothing)
    with pytest.raises(InfeasibleError):
        made(replace(options, recompute="none"))
    again = plan_again(graph(), nothing, options, Trace(None))
    assert again.recompute
    assert again.predicted.peak_bytes <= tight().limit


def test_recomputation_is_chosen_again_under_another_limit() -> None:
    more = Options.like(tight(), memory=2 * free().predicted.peak_bytes, recompute="auto")
    assert not plan_again(graph(), tight(), more, Trace(None)).recompute


def test_no_other_devices_are_tried_if_nothing_fits(builds: list[str]) -> None:
    """Planning for a user does; its suggestions are not shown with an alternative."""
    little = Options.like(tight(), memory=0.01 * tight().limit, recompute="none")
    builds.clear()
    with pytest.raises(InfeasibleError):
        plan_again(graph(), tight(), little, Trace(None))
    assert len(builds) == 1


def test_alternatives_to_one_plan_share_prices_and_lifetimes() -> None:
    """As `why` asks for them: the second differs from the first in one more pin."""
    known, plan = Prices(MESH, cost_model(MESH, Options())), tight()
    first = otherwise(plan)
    assert isinstance(first.pins, dict)
    second = replace(first, pins={**first.pins, "blocks.*.down.weight": "[8, 64]"})
    plans, priced = [], []
    with (
        patch("autopar.intra_op.price_cache.lifetimes", wraps=lifetimes) as found,
        patch.object(Resharder, "costs", autospec=True, side_effect=Resharder.costs) as costs,
    ):
        for options in (first, second):
            before = costs.call_count
            plans.append(plan_again(graph(), plan, options, Trace(None), known=known))
            priced.append(costs.call_count - before)
    assert found.call_count == 1
    assert priced[1] < priced[0] / 2
    alone = plan_again(graph(), plan, second, Trace(None))
    assert plans[1].nodes == alone.nodes
    assert plans[1].predicted == alone.predicted

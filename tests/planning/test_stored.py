"""Further batches and evaluations keep the parameters of the first program where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.pins import data_parallel
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import Devices, plan_stages, stage_graphs
from autopar.planning.planner import make_plan
from autopar.planning.stored import plan_over, storages_of
from autopar.planning.trace import Trace
from tests.fuzz.settings import Settings, Words


def captured(rows: int, microbatches: int) -> Captured:
    settings = Settings.of(0)
    model = Words(4, False, "layer", 0.0, True, "", "mean").double()
    (batch,) = replace(settings, rows=(rows,)).batches()
    return capture_call(Call(model, (), batch), Options(), Trace(None), microbatches)


def parameters(graphs: list[Graph]) -> list[set[str]]:
    return [{leaf.target for leaf in graph.leaves("param")} for graph in graphs]


@pytest.mark.parametrize("after", ["blocks.3", "blocks.2"])
def test_an_odd_batch_keeps_the_stages_of_a_tied_embedding(after: str) -> None:
    """With one microbatch the loss has no counts, so that the graph has other operators."""
    first, further = captured(12, 4).graph, captured(17, 1).graph
    assert [node.name for node in first.nodes] != [node.name for node in further.nodes]
    (written,) = (
        leaf.name for leaf in first.leaves("param") if leaf.target == f"{after}.down.weight"
    )
    (product,) = first.users[written]
    (end,) = first.users[product]  # the residual sum, the last operator before the head or a block
    groups = [Devices(Mesh.parse("cpu: x=1"), rank) for rank in range(2)]
    whole = Mesh.parse("cpu: x=2")
    plan = plan_stages(first, [end], groups, whole, 4, "1f1b", Options(), Trace(None))
    graph, found = plan_over(first, replace(plan, microbatches=1), further, Options())
    before = parameters(stage_graphs(first, plan.ends, Trace(None)))
    assert parameters(stage_graphs(graph, found.ends, Trace(None))) == before
    assert "embed.weight" in before[0] & before[-1]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.norm(x)), y)


def test_an_evaluation_drops_pins_that_contradict_stored_parameters() -> None:
    """Training computes the statistics of all rows, and stores the norm's weight whole for them."""
    mesh = Mesh.parse("cpu[1GFLOP/s 64GiB 1GB/s]: gpu=2 @10GB/s 1us")
    options = Options(pins=[data_parallel("gpu")], state="zero3")
    batch = {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 4).double()}
    first, further = (
        capture_call(Call(Normed().double().train(mode), (), batch), options, Trace(None)).graph
        for mode in (True, False)
    )
    plan = Plan.of(make_plan(first, mesh, options, Trace(None)))
    graph, found = plan_over(first, plan, further, options)
    assert storages_of(graph, found.stage) == storages_of(first, plan.stage)

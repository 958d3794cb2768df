"""Stages of a further batch keep the parameters of the first one's, tied ones included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.capture.capture import Captured
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import Devices, plan_stages, stage_graphs
from autopar.planning.stored import plan_over
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

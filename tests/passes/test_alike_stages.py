"""Stages that differ only in names are observed in torch once."""

from __future__ import annotations

import pytest

from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph
from autopar.ir.stage_graphs import alike, cut
from autopar.operators.interpret import annotate
from autopar.passes import alike_stages
from autopar.passes.normalise import FINDING, prepare
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support import models


def test_stages_are_prepared_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.mlp((8,) * 9)
    options = Options(loss_fn=models.squared_error)
    graph = capture_call(Call(model, (), batch), options, Trace(None), 2).graph
    linears = [node.name for node in graph.nodes if node.op == "aten.linear"]
    parts = cut(graph, linears[1:-1:2])
    alone = [prepare(part, passes=FINDING) for part in parts]
    observed: list[Graph] = []

    def counted(part: Graph) -> Graph:
        observed.append(part)
        return annotate(part)

    monkeypatch.setattr("autopar.operators.interpret.annotate", counted)
    prepared = alike_stages.preparing()
    assert list(map(format_graph, map(prepared, parts))) == list(map(format_graph, alone))
    assert len(observed) == len(set(map(alike, alone))) < len(parts)

"""The same input gives the same plan, whatever the clock says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.mesh import Mesh
from autopar.planning.options import Options
from autopar.planning.pipelines.automatic import find_pipeline
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.planning.workers import Workers
from tests.intra_op.test_budget import hurried
from tests.planning.test_numbers_of_microbatches import on_microbatches, traced


def test_a_plan_within_memory_does_not_depend_on_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, mesh = traced(8), Mesh.parse("H100: gpu=4")
    free = make_plan(graph, mesh, Options(), Trace(None)).predicted.peak_bytes

    def text() -> str:
        plan = make_plan(graph, mesh, Options(memory=0.7 * free), Trace(None))
        assert plan.solver.ended in ("proof", "work")
        return str(replace(plan, solver=replace(plan.solver, seconds=0.0)))

    usual = text()
    hurried(monkeypatch)
    assert text() == usual


def test_a_pipeline_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, memory = Mesh.parse("H100: gpu=2"), 1.3e7

    def pipeline() -> str:
        with Workers(0) as workers:
            model = on_microbatches(4, mesh)
            return str(find_pipeline(model, memory, lambda text: None, workers).pipeline)

    usual = pipeline()
    hurried(monkeypatch)
    assert pipeline() == usual

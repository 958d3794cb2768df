"""Step time against memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.plan_entries import Prediction
from autopar.planning.frontier import frontier
from autopar.planning.options import Options
from autopar.planning.planner import Planner
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.planning.test_recomputation import MESH, graph

# Peak and time of the plans that there are; the third is never the fastest.
PLANS = ((100.0, 1.0), (60.0, 2.0), (55.0, 4.0), (40.0, 3.0), (20.0, 9.0))


def fastest(limit: float) -> StagePlan:
    fitting = [(time, peak) for peak, time in PLANS if peak <= limit]
    if not fitting:
        raise InfeasibleError("nothing fits")
    time, peak = min(fitting)
    plan = StagePlan("graph", Mesh.parse("cpu: gpu=2"), {})
    return replace(plan, predicted=Prediction(time, peak))


def test_all_plans_that_no_other_beats() -> None:
    found = [
        (plan.predicted.peak_bytes, plan.predicted.step_seconds) for plan in frontier(fastest, 0.99)
    ]
    assert found == [(100.0, 1.0), (60.0, 2.0), (40.0, 3.0), (20.0, 9.0)]


def test_less_memory_takes_longer() -> None:
    planned = Planner(graph(), MESH, Options(), Trace(None)).plan
    found = [plan.predicted for plan in frontier(planned, 0.5)]
    assert len(found) > 1
    for one, other in itertools.pairwise(found):
        assert other.peak_bytes <= 0.5 * one.peak_bytes * (1 + 1e-9)
        assert other.step_seconds > one.step_seconds
    with pytest.raises(InfeasibleError):
        planned(0.5 * found[-1].peak_bytes)

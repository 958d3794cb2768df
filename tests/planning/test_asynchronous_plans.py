"""Plans of pipelines without flushes: weight versions in memory, and the steady state's time."""

from __future__ import annotations

from functools import partial

import pytest

from autopar.capture.capture import Captured
from autopar.errors import InfeasibleError, ScheduleError
from autopar.inter_op.laws import law
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.simulated import Simulated, simulated
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.plan_model import plan_evenly
from autopar.planning.trace import Trace
from tests.support.models import gpt2

MICROBATCHES = 8
TRACE = Trace(None)
MESH = Mesh.parse("toy[1GFLOP/s 64GiB 1GB/s]: gpu=4 @1GB/s 1us")
OPTIONS = partial(Options, stages=4, microbatches=MICROBATCHES, allow="stale gradients")


@pytest.fixture(scope="module")
def captured() -> Captured:
    model, batch = gpt2(4, batch=8, tie_word_embeddings=False)
    return capture_call(Call(model, (), batch), OPTIONS(), TRACE, MICROBATCHES)


def planned(captured: Captured, schedule: str, **how: object) -> tuple[Plan, Simulated]:
    options = OPTIONS(schedule=schedule, state="zero1", **how)  # type: ignore[arg-type]
    plan = plan_evenly(captured.graph, MESH, options, TRACE)
    graphs = stage_graphs(captured.graph, plan.ends, TRACE)
    return plan, simulated(graphs, plan, options)


def test_older_versions_take_memory_and_no_bubble_takes_less_time(captured: Captured) -> None:
    _, flushed = planned(captured, "1f1b")
    for schedule, versions in (("2bw", (2, 2, 2, 2)), ("pipedream", (4, 3, 2, 1))):
        plan, found = planned(captured, schedule)
        assert plan.predicted.step_seconds == found.seconds
        for own, exact, stage, held in zip(
            found.memory, flushed.memory, found.stages, versions, strict=True
        ):
            assert own - exact == pytest.approx((held - 1) * stage.weights)
        assert found.seconds < flushed.seconds
        slowest = max(s.forward + s.backward for s in found.stages)
        assert found.seconds >= MICROBATCHES * slowest * (1 - 1e-9)


def test_a_plan_leaves_room_for_older_versions(captured: Captured) -> None:
    """Within what 1F1B needs there is none for a second version, or another plan is taken."""
    _, flushed = planned(captured, "1f1b")
    limit = max(flushed.memory) * 1.001
    planned(captured, "1f1b", memory=limit, recompute="none")
    with pytest.raises(InfeasibleError):
        planned(captured, "2bw", memory=limit, recompute="none")


def test_a_schedule_has_to_be_allowed_before_anything_is_planned() -> None:
    with pytest.raises(ScheduleError, match="'2bw' trains with stale gradients"):
        Options(stages=2, microbatches=2, schedule="2bw")


def test_the_law_of_a_schedule_without_a_flush_is_that_of_its_period() -> None:
    told = law("2bw")
    assert told.fill(4, 8) == 0
    assert [told.in_flight(rank, 4, 8) for rank in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert not told.fits(4, 3)
    assert told.fits(4, 4)

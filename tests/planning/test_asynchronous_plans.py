"""Plans of pipelines without flushes: weight versions in memory, and the steady state's time."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest

from autopar.capture.capture import Captured
from autopar.errors import InfeasibleError, ScheduleError
from autopar.inter_op.laws import law
from autopar.inter_op.schedules import candidates
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines import automatic
from autopar.planning.pipelines.automatic import AnySize, OnMicrobatches, find_pipeline
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.planning.pipelines.search import SearchResult
from autopar.planning.pipelines.simulated import Simulated, simulated
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.pipelines.streaming import Copies, Streamed, copies_of
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
    """PipeDream and AMPNet update after every microbatch, and accumulate no gradients."""
    _, flushed = planned(captured, "1f1b")
    _, single = planned(captured, "ampnet")
    assert all(a < b for a, b in zip(single.memory, flushed.memory, strict=True))
    cases = ("2bw", flushed, (2, 2, 2, 2)), ("pipedream", single, (4, 3, 2, 1))
    for schedule, of_one, versions in cases:
        plan, found = planned(captured, schedule)
        assert plan.predicted.step_seconds == found.seconds
        weights = [
            sum(leaf.type.nbytes for leaf in graph.leaves("param") if leaf.requires_grad)
            for graph in stage_graphs(captured.graph, plan.ends, TRACE)
        ]
        for own, exact, nbytes, held in zip(
            found.memory, of_one.memory, weights, versions, strict=True
        ):
            assert own - exact == pytest.approx((held - 1) * nbytes)
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


def test_a_search_takes_what_it_is_allowed_and_a_model_can_be_trained_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every method is searched for with its own memory and updates, unless a reason speaks against
    it, which is told; the fastest of all searches is taken."""
    asked: dict[str, tuple[Options, Streamed]] = {}

    def searched(*args: object, **how: object) -> SearchResult:
        (name,) = how["schedules"] if len(how["schedules"]) == 1 else ("",)  # type: ignore[arg-type,misc]
        asked[name] = args[3], how["streamed"]  # type: ignore[assignment]
        seconds = {"": 3.0, "ampnet": 2.0}.get(name, 2.5)
        return SearchResult(name, seconds, None, (), None)  # type: ignore[arg-type]

    @cache
    def graph(tied: bool, samples: int) -> Graph:
        model, batch = gpt2(2, batch=8, tie_word_embeddings=tied)
        return capture_call(Call(model, (), batch).sized(samples), Options(), TRACE).graph

    def found(tied: bool, device: str, **how: Any) -> tuple[SearchResult, set[str], list[str]]:
        asked.clear()
        told: list[str] = []
        model = AnySize(lambda samples, _: graph(tied, samples))
        options, mesh = Options(stages="auto", **how), Mesh.parse(f"{device}: gpu=4")
        best = find_pipeline(OnMicrobatches(model, 8, mesh, options), math.inf, told.append)
        return best, {*asked} - {""}, told

    monkeypatch.setattr(automatic, "search", searched)
    every = {*candidates("stale gradients")} - {*candidates()}
    allowed: dict[str, Any] = {"allow": "stale gradients"}
    best, names, _ = found(False, "cpu", **allowed)
    assert (best.pipeline, names) == ("ampnet", every)
    assert asked["pipemare"][0].recompute == "none"
    assert asked["2bw"][0].recompute == "auto"
    assert asked["bounded_staleness"][1].late
    assert len(best.others) == len(every)
    _, names, told = found(True, "cpu", **allowed)
    assert names == {"2bw", "pipedream vertical=1", "bounded_staleness"}
    assert any("ampnet is left out: stages would run on weights" in line for line in told)
    assert found(False, "A100-80", **allowed)[1] == every - {"bounded_staleness"}
    assert found(False, "cpu", **allowed, offload="optimizer")[1] == set()
    assert found(False, "cpu")[1] == set()


@pytest.mark.parametrize(
    ("name", "once", "each"),
    [
        ("2bw", Copies(1), Copies(0)),
        ("pipedream", Copies(0), Copies(1)),
        ("pipedream vertical=1", Copies(3), Copies(0)),
        ("ampnet", Copies(), Copies()),
        ("pipemare", Copies(1, 2), Copies()),
        ("bounded_staleness ahead=2", Copies(0, 2), Copies()),
    ],
)
def test_a_search_counts_what_the_rows_hold(name: str, once: Copies, each: Copies) -> None:
    """Of every rank of four, by its microbatches in flight."""
    assert Streamed(name).copies(4, 8) == (once, each)
    made = schedule_of(name, 4, 8)
    for stage in range(4):
        further = made.in_flight[stage] - 1
        wanted = Copies(once.held + further * each.held, once.updated + further * each.updated)
        assert copies_of(made)[stage] == wanted


def test_the_law_of_a_schedule_without_a_flush_is_that_of_its_period() -> None:
    told = law("2bw")
    assert told.fill(4, 8) == 0
    # Replicas that do not wait for one another still empty their pipelines.
    assert law("bounded_staleness").fill(4, 8) == pytest.approx(1)
    assert [told.in_flight(rank, 4, 8) for rank in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert not told.fits(4, 3)
    assert told.fits(4, 4)

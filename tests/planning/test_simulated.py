"""The simulation of a pipeline's plan, against the simulated step of the model without stages."""

from __future__ import annotations

import pytest

import autopar
from autopar.cost.model import AnalyticModel
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import schedule
from autopar.intra_op.build import build
from autopar.intra_op.rules import rules
from autopar.intra_op.work.kernel_work import works
from autopar.ir.mesh import Mesh
from autopar.ir.stage_graphs import SENT
from autopar.ir.tensor import Layout
from autopar.planning.capturing import Call, capture_call, capture_graph
from autopar.planning.options import Options
from autopar.planning.pipelines.simulated import Simulated, simulated
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.plan_model import plan_evenly
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import Settings, Timeline, run, tasks
from tests.support.models import gpt2

DEVICE = "toy[1GFLOP/s 64GiB 1GB/s]"
MICROBATCHES = 4


def mesh(devices: int, bandwidth: str = "1GB/s") -> Mesh:
    return Mesh.parse(f"{DEVICE}: gpu={devices} @{bandwidth} 1us")


def staged(options: Options, devices: int, bandwidth: str = "1GB/s") -> Simulated:
    model, batch = gpt2(4)
    trace = Trace(None)
    call = Call(model, (), batch)
    captured = capture_call(call, options, trace, options.microbatches)
    plan = plan_evenly(captured.graph, mesh(devices, bandwidth), options, trace)
    graphs = stage_graphs(captured.graph, plan.ends, trace)
    return simulated(graphs, plan, options)


@pytest.fixture(scope="module")
def whole() -> Timeline:
    """One microbatch of the model in one piece on one device."""
    model, batch = gpt2(4, batch=8 // MICROBATCHES)
    graph = capture_graph(model, (), batch, Options(), Trace(None)).graph
    plan, price = make_plan(graph, mesh(1), Options(), Trace(None)), AnalyticModel(mesh(1))
    return run(tasks(graph, plan, works(graph, plan, rules()), price, Settings()), price, 2.0)


@pytest.fixture(scope="module")
def four() -> Simulated:
    return staged(Options(stages=4, microbatches=MICROBATCHES), 4)


def seconds(timeline: Timeline, phase: str) -> float:
    return sum(span.seconds for span in timeline.spans if span.task.phase == phase)


def test_stages_take_together_what_the_model_takes(four: Simulated, whole: Timeline) -> None:
    assert sum(s.forward for s in four.stages) == pytest.approx(seconds(whole, "forward"), rel=0.01)
    backward = sum(s.backward for s in four.stages)
    # Masks and the like are made again in every stage; they have no backward.
    assert backward == pytest.approx(seconds(whole, "backward"), rel=0.01)


def test_stages_keep_together_what_the_model_keeps(four: Simulated, whole: Timeline) -> None:
    """But for what is received, and the embedding, which is also the head: it stands in two."""
    fixed = sum(s.fixed for s in four.stages)
    tied = 4 * 96 * 32 * 4  # parameter, gradient and two moments in float32
    kinds = whole.memory.kinds
    assert fixed == pytest.approx(2 * kinds["parameter"] + kinds["optimizer"] + tied, rel=0.02)
    most = max(memory for memory in four.memory)
    assert (
        max(s.fixed + s.kept for s in four.stages)
        < most
        < fixed + 4 * sum(s.kept + s.transient for s in four.stages)
    )


def test_the_schedule_is_played_with_the_stages_figures(four: Simulated) -> None:
    costs = [StageCost(s.forward, s.backward / 2, s.backward / 2) for s in four.stages]
    there, back = (
        [getattr(s, name) for s in four.stages[1:]] for name in ("arriving", "returning")
    )
    alone = simulate(schedule("1f1b", 4, MICROBATCHES), costs, there, back)
    assert four.timeline.computed == alone.seconds
    assert four.seconds == alone.seconds + max(s.optimizer for s in four.stages)
    slowest = max(s.forward + s.backward for s in four.stages)
    assert four.seconds > MICROBATCHES * slowest


def test_transfers_follow_bytes_and_bandwidth(four: Simulated) -> None:
    """A stage receives one activation of two samples, and sends back its gradient."""
    nbytes = 2 * 16 * 32 * 4
    slower = staged(Options(stages=4, microbatches=MICROBATCHES), 4, "0.5GB/s")
    for fast, slow in zip(four.stages[1:], slower.stages[1:], strict=True):
        assert slow.arriving - fast.arriving == pytest.approx(nbytes / 1e9)
        assert fast.returning == fast.arriving
    assert (four.stages[0].arriving, four.stages[0].returning) == (0.0, 0.0)


def test_stages_in_one_place_send_nothing() -> None:
    found = staged(Options(stages=4, microbatches=MICROBATCHES, schedule="zb_v"), 2)
    # Stages 1 and 2 share their device, at the foot of the V.
    assert [s.arriving > 0 for s in found.stages] == [False, True, False, True]
    assert len(found.memory) == 2
    # The foot's device updates the second and the third stage, one behind the other.
    once = [stage.optimizer for stage in found.stages]
    last = max(once[0] + once[3], once[1] + once[2])
    assert found.seconds == pytest.approx(found.timeline.computed + last, rel=1e-12)


def test_stages_gather_what_others_send_them() -> None:
    """A value that every device of a stage reads arrives in parts; so does its gradient."""
    model, batch = gpt2(4)
    line = Mesh.parse(f"{DEVICE}: node=2, gpu=2 @1GB/s 1us")
    options = Options(stages=2, microbatches=MICROBATCHES, pins=autopar.pins.megatron("gpu"))
    captured = capture_call(Call(model, (), batch), options, Trace(None), MICROBATCHES)
    plan = plan_evenly(captured.graph, line, options, Trace(None))
    first, second = stage_graphs(captured.graph, plan.ends, Trace(None))
    half = 2 * 16 * 32 * 4 / 2  # bytes that a device gets from the other one
    once = half / 1e9 + 1e-6
    (leaf,) = second.leaves("received")
    (sent,) = (node for user, node in first.outputs if user.startswith(SENT))
    for graph, stage, phase, node in (
        (first, plan.stages[0], "backward", first[sent]),
        (second, plan.stages[1], "forward", leaf),
    ):
        price = AnalyticModel(stage.mesh)
        step = tasks(graph, stage, works(graph, stage, rules()), price, Settings())
        spans = [s for s in run(step, price, 2.0).spans if s.task.cause == "exchange"]
        assert [s.seconds for s in spans if s.task.phase == phase and not s.task.node] == [
            pytest.approx(once)
        ]
        # The search pays the same for it, and nothing for a value that every device reads in part.
        built = build(graph, stage.mesh, price, options.table)
        at = built.names.index(graph.template[node.name])
        whole, parts = (
            built.options[at].index(next(o for o in built.options[at] if o.results[0] == layout))
            for layout in (Layout.replicated(3), Layout((("gpu",), (), ())))
        )
        cost = built.problem.nodes[at].cost
        assert cost[whole] - cost[parts] == pytest.approx(once)


def test_what_runs_side_by_side_counts_once() -> None:
    """Linears beside collectives shorten both directions of a stage."""
    model, batch = gpt2(2)
    near = Mesh.parse("H100: stage=2, gpu=2")
    found = []
    for fuse in ((), ("async_tensor_parallel",)):
        options = Options(
            stages=2, microbatches=MICROBATCHES, pins=autopar.pins.megatron_sp("gpu"), fuse=fuse
        )
        call = Call(model, (), batch)
        captured = capture_call(call, options, Trace(None), MICROBATCHES)
        plan = plan_evenly(captured.graph, near, options, Trace(None))
        found.append(simulated(stage_graphs(captured.graph, plan.ends, Trace(None)), plan, options))
    for apart, beside in zip(found[0].stages, found[1].stages, strict=True):
        assert beside.forward < apart.forward
        assert beside.backward < apart.backward


def test_both_halves_of_a_split_backward_recompute_the_blocks() -> None:
    """The recomputation takes what a backward takes longer with it than without."""
    plain, full, split = (
        staged(Options(stages=2, microbatches=MICROBATCHES, schedule=name, recompute=how), 2)
        for name, how in (("1f1b", "none"), ("1f1b", "full"), ("zb_h1", "full"))
    )
    timeline = split.timeline
    for rank, (without, once, twice) in enumerate(
        zip(plain.stages, full.stages, split.stages, strict=True)
    ):
        again = once.backward - without.backward
        assert once.again == twice.again == pytest.approx(again, rel=0.05)
        spans = zip(timeline.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        busy = sum(end - start for action, start, end in spans if action.kind in "FIW")
        each = once.forward + once.backward + once.again
        assert busy == pytest.approx(MICROBATCHES * each, rel=1e-6)

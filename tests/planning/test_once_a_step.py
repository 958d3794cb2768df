"""The prices of adding up gradients, of gathering updated parameters, and of the slowest device."""

from __future__ import annotations

import math

import numpy as np
import pytest

import autopar
from autopar.cli.explain import explained
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.cost.overlap import side_by_side
from autopar.cost.work import accumulation_work
from autopar.intra_op.states import StateChoice
from autopar.intra_op.storage_choices import stored_traffic
from autopar.ir.executed.execution import Execution
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.tensor import Layout, TensorType
from autopar.ir.update import ADAMW
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.pipelines.simulated import Simulated, simulated
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.plan_model import plan_evenly
from autopar.planning.trace import Trace
from tests.support.models import gpt2

MICROBATCHES = 4
BANDWIDTH = 0.7e9  # what a described device attains of 1 GB/s
LAUNCH = 10e-6


def staged(words: str, mesh: str, **options: object) -> tuple[Simulated, tuple[Graph, ...]]:
    """A pipeline of two stages on a device of 1 GB/s, and its graphs."""
    model, batch = gpt2(4)
    asked = Options(
        stages=2, microbatches=MICROBATCHES, execution=Execution.read(words),
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    captured = capture_call(Call(model, (), batch), asked, Trace(None), MICROBATCHES)
    line = Mesh.parse(f"toy[1GFLOP/s 64GiB 1GB/s]: {mesh}")
    plan = plan_evenly(captured.graph, line, asked, Trace(None))
    graphs = tuple(stage_graphs(captured.graph, plan.ends, Trace(None)))
    return simulated(graphs, plan, asked), graphs


def test_a_microbatch_adds_its_gradients_to_those_of_the_ones_before() -> None:
    """Reading two tensors and writing one takes what the memory takes."""
    alone, graphs = staged("adds", "gpu=2 @1GB/s 1us")
    added, _ = staged("", "gpu=2 @1GB/s 1us")
    for graph, fused, apart in zip(graphs, alone.stages, added.stages, strict=True):
        trained = [leaf.type.nbytes for leaf in graph.leaves("param") if graph.users[leaf.name]]
        each = 3 * sum(trained) / BANDWIDTH + len(trained) * LAUNCH
        assert apart.backward - fused.backward == pytest.approx(each, rel=1e-6)
        assert apart.forward == fused.forward
    assert added.seconds > alone.seconds


def test_an_explained_stage_takes_what_is_predicted_with_its_additions() -> None:
    model, batch = gpt2(2)
    asked = Options(stages=2, microbatches=MICROBATCHES)
    captured = capture_call(Call(model, (), batch), asked, Trace(None), MICROBATCHES)
    plan = plan_evenly(captured.graph, Mesh.parse("H100: stage=2, gpu=2"), asked, Trace(None))
    for graph, stage in zip(
        stage_graphs(captured.graph, plan.ends, Trace(None)), plan.stages, strict=True
    ):
        price = AnalyticModel(stage.mesh, in_step=True, whole=plan.mesh)
        found = explained(graph, stage, 1e12, price=price, repeated=Repeated(MICROBATCHES))
        assert found.added > 0
        assert found.step == pytest.approx(stage.predicted.step_seconds, rel=1e-9)


@pytest.mark.parametrize(("state", "sent", "read"), [("ddp", "f32", 2), ("zero3", "f32", 4 / 2)])
def test_the_planner_pays_what_a_simulated_microbatch_adds(
    state: str, sent: str, read: float
) -> None:
    """A weight in bf16 whose gradients add up in float32: whole, or the half of each device."""
    mesh, weight = Mesh.parse("H100: data=2"), TensorType("bf16", (1024, 1024))
    used, prices = Layout(((), ()), varying=("data",)), AnalyticModel(mesh, in_step=True)
    storage = StateChoice.read(state, mesh).storages(used, weight, mesh)[0]
    traffic = stored_traffic(
        weight, True, storage, mesh, prices, ADAMW.rules[0],
        precision=Precision("bf16", communication=sent),
    )  # fmt: skip
    added, fused = (
        traffic.cost(MICROBATCHES, waits=True, how=Execution(adds=adds)) for adds in (False, True)
    )
    total = 4 * weight.numel / (2 if state == "zero3" else 1)
    work = accumulation_work(read * weight.numel, total, "f32")
    assert added.added == pytest.approx(prices.compute(work))
    assert added.seconds - fused.seconds == pytest.approx(added.added)
    chip, moved = device(mesh), read * weight.numel + 2 * total
    rate = chip.memory_bandwidth * chip.memory_efficiency
    expected = (moved + chip.memory_ramp) / rate + chip.launch
    assert added.added == pytest.approx(expected)
    assert traffic.cost(1, waits=True).added == 0


@pytest.mark.parametrize("microbatches", [1, 4])
def test_copies_out_of_and_into_messages_are_paid_at_the_speed_of_memory(microbatches: int) -> None:
    """Each gather reads and writes a weight in bf16; its gradient is written in f32."""
    mesh, weight = Mesh.parse("H100: data=2"), TensorType("bf16", (1024, 1024))
    used, prices = Layout(((), ()), varying=("data",)), AnalyticModel(mesh, in_step=True)
    chip, seconds = device(mesh), {}
    rate = chip.memory_bandwidth * chip.memory_efficiency
    for state in ("zero3", "zero3, gathered again", "ddp", "zero2"):
        storage = StateChoice.read(state, mesh).storages(used, weight, mesh)[0]
        traffic = stored_traffic(
            weight, True, storage, mesh, prices, ADAMW.rules[0], precision=Precision("bf16")
        )
        plain, copied = (
            traffic.cost(microbatches, waits=True, how=Execution(copies=copies))
            for copies in (False, True)
        )
        seconds[state] = copied.seconds - plain.seconds
        assert copied.added - plain.added == pytest.approx(seconds[state])
        assert copied.nbytes == plain.nbytes
    each = {
        nbytes: (nbytes * weight.numel + chip.memory_ramp) / rate + chip.launch for nbytes in (4, 6)
    }
    assert seconds["zero3"] == pytest.approx(each[4] + each[6])
    assert seconds["zero3, gathered again"] == pytest.approx(2 * each[4] + each[6])
    assert seconds["ddp"] == pytest.approx(each[6] / microbatches)  # reduced once a step
    assert seconds["zero2"] == pytest.approx(each[6] + each[4] / microbatches)  # gathered once


def test_updated_parameters_are_gathered_beside_the_first_forwards() -> None:
    given = {"state": "zero1", "pins": autopar.pins.data_parallel("gpu")}
    waits, _ = staged("", "stage=2, gpu=2 @1GB/s 1us", **given)
    ahead, _ = staged("ahead", "stage=2, gpu=2 @1GB/s 1us", **given)
    for late, early in zip(waits.stages, ahead.stages, strict=True):
        assert early.ahead > 0
        assert early.optimizer + early.ahead == pytest.approx(late.optimizer)
        assert (early.forward, early.backward) == (late.forward, late.backward)
    # Two stages: the parameters are needed by the second of the first two microbatches' forwards.
    saved = waits.seconds - ahead.seconds
    left = [side_by_side(2 * s.forward, s.ahead, s.slowdown) - 2 * s.forward for s in ahead.stages]
    assert saved == pytest.approx(max(s.ahead for s in ahead.stages) - max(left), rel=0.2)


@pytest.mark.parametrize("count", [1, 8, 256])
def test_a_step_takes_the_time_of_the_slowest_device(count: int) -> None:
    """Against the mean of the lowest of so many normal rates, drawn 4000 times."""
    chip = device(Mesh.parse("A100-80: gpu=8"))
    rates = np.random.default_rng(0).normal(1.0, chip.variation, (4000, count)).min(axis=1)
    expected = chip.step_efficiency * float(rates.mean())
    assert chip.step_share(count) == pytest.approx(expected, rel=0.1 * chip.variation)
    assert math.isclose(device(Mesh.parse("cpu: x=4")).step_share(count), 1.0)

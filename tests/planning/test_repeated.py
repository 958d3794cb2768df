"""Stages in a step: torch's memory in flight, work that is done once, plans by need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.cost.model import AnalyticModel
from autopar.inter_op.schedules import schedule
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.pins import data_parallel
from autopar.plan_entries import Prediction
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.pipelines.simulated import stage_figures
from autopar.planning.pipelines.stages import Devices, in_flight, plan_stages, stage_graphs
from autopar.planning.pipelines.stages_at_once import by_in_flight
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.support import models

WIDTHS = (64, 128, 128, 128, 32)


@pytest.fixture(scope="module")
def perceptron() -> tuple[nn.Module, dict[str, torch.Tensor], Graph, list[str]]:
    """A perceptron on a microbatch of 16 rows, to be cut behind its second activation."""
    torch.manual_seed(0)
    model, batch = models.mlp(WIDTHS, batch=64)
    options = Options(loss_fn=models.squared_error)
    graph = capture_call(Call(model, (), batch), options, Trace(None), 4).graph
    ends = [node.name for node in graph.nodes if node.op == "aten.gelu"]
    return model, batch, graph, [ends[1]]


def planned(part: Graph, mesh: str, repeated: Repeated | None, **options: object) -> StagePlan:
    given = Options(**options)  # type: ignore[arg-type]
    return make_plan(part, Mesh.parse(mesh), given, Trace(None), repeated)


def test_what_is_in_flight_is_what_torch_saves_and_the_result(
    perceptron: tuple[nn.Module, dict[str, torch.Tensor], Graph, list[str]],
) -> None:
    model, batch, graph, ends = perceptron
    part = stage_graphs(graph, ends, Trace(None))[0]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)][:2]
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def save(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().data_ptr() not in owned:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
        x = batch["x"][:16].clone()
        for linear in linears:
            x = torch.nn.functional.gelu(linear(x))
    save(x)  # until its gradient comes, with which the backward begins
    peaks = [
        planned(part, "cpu: gpu=1", Repeated(8, count)).predicted.peak_bytes for count in (1, 4)
    ]
    assert peaks[1] - peaks[0] == pytest.approx(3 * sum(kept.values()))


def test_gradients_are_synchronised_once_a_step(
    perceptron: tuple[nn.Module, dict[str, torch.Tensor], Graph, list[str]],
) -> None:
    """Seconds of a microbatch are a constant and a part in the number of microbatches."""
    _, _, graph, ends = perceptron
    part = stage_graphs(graph, ends, Trace(None))[0]
    pins, slow = data_parallel("gpu"), "H100: gpu=2 @1GB/s"
    seconds = [
        planned(part, slow, Repeated(count), pins=pins).predicted.step_seconds
        for count in (1, 2, 4, 8)
    ]
    assert seconds[0] > seconds[1]
    # A single one adds its gradients to no others.
    assert seconds[1] - seconds[2] == pytest.approx(2 * (seconds[2] - seconds[3]))
    alone = planned(part, slow, None, pins=pins).predicted
    # A stage's update is a part of its pipeline's step.
    assert seconds[0] == pytest.approx(alone.step_seconds - alone.update_seconds)


def test_a_stage_with_more_in_flight_takes_less_memory_for_each() -> None:
    """Under a limit that one microbatch does not feel, many are run in another way, which fits."""
    torch.manual_seed(0)
    model, batch = models.mlp((512, 64, 512, 64), batch=2048)
    options = Options(loss_fn=models.squared_error)
    graph = capture_call(Call(model, (), batch), options, Trace(None), 8).graph
    ends = [next(node.name for node in graph.nodes if node.op == "aten.gelu")]
    part = stage_graphs(graph, ends, Trace(None))[0]
    mesh = "H100: gpu=2"
    few, many = (planned(part, mesh, Repeated(8, count)) for count in (1, 8))
    most, least = many.predicted.peak_bytes, few.predicted.peak_bytes
    assert most > least
    # Whatever the limit between the two, what is planned for eight keeps it.
    frugal = planned(part, mesh, Repeated(8, 8), memory=0.95 * most)
    assert frugal.predicted.peak_bytes <= 0.95 * most
    assert frugal.predicted.step_seconds >= many.predicted.step_seconds


def test_a_device_keeps_what_its_other_stages_keep_and_needs_once_what_one_needs_for_a_while(
    perceptron: tuple[nn.Module, dict[str, torch.Tensor], Graph, list[str]],
) -> None:
    _, _, graph, ends = perceptron
    part, mesh = stage_graphs(graph, ends, Trace(None))[0], Mesh.parse("H100: gpu=2")
    alone = planned(part, str(mesh), Repeated(8, 4))
    shared = planned(part, str(mesh), Repeated(8, 4, rank_stages=3))
    assert shared.nodes == alone.nodes
    options = Options()
    figures = stage_figures(part, alone, options, AnalyticModel(mesh))
    kept = figures.fixed + 4 * figures.kept
    peaks = [plan.predicted.peak_bytes for plan in (alone, shared)]
    assert peaks[1] - peaks[0] == pytest.approx(2 * kept)
    # What the problem itself counts, too, keeps a limit that only a thriftier plan keeps.
    limit = 0.97 * shared.predicted.peak_bytes
    thrifty = planned(part, str(mesh), Repeated(8, 4, rank_stages=3), memory=limit)
    assert thrifty.predicted.peak_bytes <= limit


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "interleaved_1f1b chunks=2"])
def test_plans_serve_the_numbers_in_flight(name: str) -> None:
    """Each stage's plan is made for as many as it has in flight, or for more and as fast."""
    text, _, chunks = name.partition(" chunks=")
    made = schedule(text, 4, 8, **({"chunks": int(chunks)} if chunks else {}))
    kept = sorted({in_flight(made, stage) for stage in range(made.stages)})
    asked = []

    def plan(count: float) -> StagePlan:
        asked.append(count)
        shell = StagePlan("", Mesh.parse("H100: gpu=1"), {})
        return replace(shell, predicted=Prediction(1.0 + (count > 2), peak_bytes=count))

    found = by_in_flight(kept, plan)
    assert sorted(found) == kept
    for count, one in found.items():
        assert count <= one.predicted.peak_bytes
        assert one.predicted.step_seconds == 1.0 + (count > 2)
    assert len(asked) == len(set(asked))


def test_an_even_plan_says_what_it_takes(
    perceptron: tuple[nn.Module, dict[str, torch.Tensor], Graph, list[str]],
) -> None:
    """More microbatches of the same size take as much longer as a stage is busy with each."""
    _, _, graph, ends = perceptron
    mesh = Mesh.parse("cpu: gpu=2")
    groups = [Devices(Mesh.parse("cpu: gpu=1"), rank) for rank in range(2)]
    seconds = []
    for count in (4, 8, 16):
        plan = plan_stages(graph, ends, groups, mesh, count, "1f1b", Options(), Trace(None))
        assert set(plan.predicted.table()) == {"step_seconds", "bubble", "peak_bytes"}
        seconds.append(plan.predicted.step_seconds)
    assert seconds[2] - seconds[1] == pytest.approx(2 * (seconds[1] - seconds[0]))

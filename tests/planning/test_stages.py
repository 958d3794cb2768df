"""Cuts, parts of a mesh and plans of pipelines, without processes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import autopar
from autopar.capture.capture import Captured
from autopar.errors import (
    BatchError,
    MeshError,
    PinError,
    PlanError,
    PlanMismatchError,
    ScheduleError,
    StageError,
)
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline_step import Wiring
from autopar.ir.stage_graphs import cut
from autopar.passes.normalise import FINDING, prepare
from autopar.plan import Plan
from autopar.plan_entries import UNSEARCHED, ModelSpec, Prediction
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines import stages as planning
from autopar.planning.pipelines.schedule_names import groups_for, read_schedule
from autopar.planning.pipelines.stages import (
    Devices,
    equal_parts,
    even_ends,
    legal_cuts,
    plan_stages,
    schedule_of,
)
from autopar.planning.plan_model import plan_evenly
from autopar.planning.trace import Trace
from autopar.session.compiled import Compiled, placement_of
from tests.support import models

DEVICE = "toy[1GFLOP/s 64GiB 1GB/s]"
LINE = Mesh.parse(f"{DEVICE}: gpu=4 @10GB/s 1us")
CHAIN = Wiring.chain(2)


@pytest.fixture(scope="module")
def mlp() -> Captured:
    torch.manual_seed(0)
    model, batch = models.mlp((8, 16, 16, 16, 16, 8), batch=8)
    options = Options(loss_fn=models.squared_error)
    return capture_call(Call(model, (), batch), options, Trace(None), 2)


@pytest.fixture(scope="module")
def plan(mlp: Captured) -> Plan:
    return plan_evenly(
        mlp.graph, LINE, Options(stages=2, microbatches=2, schedule="1f1b"), Trace(None)
    )


def test_parts_of_a_mesh() -> None:
    grid = Mesh.parse("H100: node=4, gpu=8")
    for count, shape in [(1, (4, 8)), (2, (2, 8)), (4, (1, 8)), (8, (1, 4)), (32, (1, 1))]:
        parts = equal_parts(grid, count)
        assert {part.mesh.shape for part in parts} == {shape}
        assert [part.start for part in parts] == [n * 32 // count for n in range(count)]
        # Ranks of a part are a box of the mesh: they agree in all axes that were cut through.
        for part in parts:
            places = [grid.coordinate(part.start + n) for n in range(part.mesh.size)]
            for axis, size in zip(grid.names, shape, strict=True):
                assert len({place[axis] for place in places}) == size
    for count in (3, 6, 64):
        with pytest.raises(MeshError, match="does not divide"):
            equal_parts(grid, count)


def test_schedules_by_text() -> None:
    assert read_schedule("interleaved_1f1b chunks=2") == ("interleaved_1f1b", {"chunks": 2})
    assert groups_for("1f1b", 4, 8) == 4
    assert groups_for("interleaved_1f1b chunks=2", 4, 8) == 2
    assert groups_for("zb_v", 4, 8) == 2
    for text in ("1f1b chunks", "1f1b chunks=²", "1f1b chunks=" + "9" * 5000):
        with pytest.raises(ScheduleError, match="cannot read"):
            read_schedule(text)
    with pytest.raises(ScheduleError, match="does not take"):
        schedule_of("1f1b chunks=2", 2, 4)
    with pytest.raises(ScheduleError, match="there is no schedule"):
        groups_for("2f2b", 2, 4)
    with pytest.raises(ScheduleError, match="3 ranks"):
        groups_for("chimera", 3, 4)
    with pytest.raises(ScheduleError, match="does not take 3 stages"):
        groups_for("zb_v", 3, 4)


def slowest(seconds: list[float], ends: tuple[int, ...]) -> float:
    """Returns the seconds of the slowest of the stages that end behind those places."""
    edges = [0, *(end + 1 for end in ends), len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_even_cuts_by_brute_force(mlp: Captured, stages: int) -> None:
    """No cut has a slowest stage that is faster by more than the slack."""
    found = even_ends(mlp.graph, stages, LINE, Options())
    seconds, blocks = planning.weights(
        mlp.graph, prepare(mlp.graph, passes=FINDING), LINE, Options()
    )
    names, weights = list(seconds), list(seconds.values())
    mine = slowest(weights, tuple(names.index(end) for end in found))
    legal = legal_cuts(mlp.graph, names, blocks)
    assert len(legal) < len(names) - 1 or not blocks
    best = min(slowest(weights, ends) for ends in itertools.combinations(legal, stages - 1))
    assert best <= mine <= best * (1 + planning._SLACK) * (1 + 1e-6)


def test_blocks_stay_whole() -> None:
    torch.manual_seed(0)
    model, batch = models.gpt2(layers=4)
    captured = capture_call(Call(model, (), batch), Options(), Trace(None), 4)
    ends = even_ends(captured.graph, 4, LINE, Options())
    nodes = list(captured.graph.nodes)
    modules = [captured.graph[end].source.module for end in ends]
    for end, module in zip(ends, modules, strict=True):
        assert module.startswith("transformer.h."), module
        after = nodes[[node.name for node in nodes].index(end) + 1]
        assert after.source.module.split(".")[:3] != module.split(".")[:3]
    with pytest.raises(StageError, match="cannot be cut into"):
        even_ends(captured.graph, 10_000, LINE, Options())


def test_no_cut_between_the_uses_of_a_written_buffer() -> None:
    """Every legal cut of a network with batch norms is one that `cut` takes."""
    torch.manual_seed(0)
    model, batch = models.conv_net()
    graph = capture_call(Call(model, (), batch), Options(), Trace(None), 2).graph
    whole = prepare(graph, passes=FINDING)
    names = list(planning.weights(graph, whole, LINE, Options())[0])
    legal = legal_cuts(graph, names, {})
    refused = []
    for at in range(len(names) - 1):
        try:
            cut(graph, [names[at]])
        except StageError:
            refused.append(at)
    assert refused
    assert sorted([*legal, *refused]) == list(range(len(names) - 1))


def test_equal_stages_are_planned_once() -> None:
    torch.manual_seed(0)
    model, batch = models.mlp((8,) * 8)
    options = Options(loss_fn=models.squared_error)
    captured = capture_call(Call(model, (), batch), options, Trace(None), 4)
    graph = captured.graph
    ends = [node.name for node in graph.nodes if node.op == "aten.gelu"]
    groups = [Devices(Mesh.parse(f"{DEVICE}: gpu=1"), n) for n in range(7)]
    mesh = Mesh.parse(f"{DEVICE}: gpu=7")
    with patch.object(planning, "make_plan", wraps=planning.make_plan) as made:
        plan = plan_stages(graph, ends, groups, mesh, 4, "1f1b", Options(), Trace(None))
    # The first, the middle ones with the most and the fewest in flight, the last with the loss.
    assert made.call_count == 4
    # They share their prices, and are the plans of stages that share none.
    assert len({id(call.args[-1]) for call in made.call_args_list}) == 1
    for call in made.call_args_list:
        shared, own = planning.make_plan(*call.args), planning.make_plan(*call.args[:-1])
        assert replace(shared, solver=UNSEARCHED) == replace(own, solver=UNSEARCHED)
    assert len(Compiled.of(captured, plan, Options(), Trace(None)).sources) == 7
    nowhere = Options(pins={"nowhere": "[4]"})
    with pytest.raises(PinError, match="name nothing: nowhere"):
        plan_stages(graph, ends, groups, mesh, 4, "1f1b", nowhere, Trace(None))
    with pytest.raises(StageError, match="7 stages for the schedule 'zb_v'"):
        plan_stages(graph, ends, groups, mesh, 4, "zb_v", Options(), Trace(None))
    uneven = [*groups[:5], Devices(Mesh.parse(f"{DEVICE}: gpu=2"), 5)]
    with pytest.raises(StageError, match="unequal meshes"):
        plan_stages(graph, ends[:5], uneven, mesh, 4, "chimera", Options(), Trace(None))


def test_a_plan_is_a_file(plan: Plan, tmp_path: Path) -> None:
    plan = replace(plan, predicted=Prediction(0.25), model=ModelSpec("mlp"))
    assert Plan.from_toml(plan.to_toml()) == plan
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.toml"]
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("microbatches = 2\n", "microbatches = 0\n", "damaged entry"),
        ("microbatches = 2\n", 'microbatches = "two"\n', "damaged entry 'microbatches'"),
        ("version = 2", "version = 9", "version 9"),
        ("ranks = [2]", "ranks = [3]", "damaged entry"),
        ("ranks = [2]", "ranks = [1]", "damaged entry"),
        ("ranks = [2]", "ranks = 2", "damaged entry"),
        ("ranks = [2]", "ranks = [0, 2]", "damaged entry"),
        ("gpu=2", "gpu=two", "damaged entry"),
        ("stages", "steps", "no usable entry 'stages'"),
        ("graph =", "graph", "not readable TOML"),
    ],
)
def test_damaged_plans_are_refused(plan: Plan, old: str, new: str, error: str) -> None:
    text = plan.to_toml()
    assert old in text
    with pytest.raises(PlanError, match=error):
        Plan.from_toml(text.replace(old, new), where="plan.toml")


def test_stages_stand_where_the_schedule_wants_them(plan: Plan) -> None:
    assert placement_of(plan, CHAIN).ranks == (((0, 1), (2, 3)),)
    first, second = plan.stages
    turned = replace(plan, schedule="zb_v", stages=(first, second))
    with pytest.raises(PlanError, match="are not placed as the schedule 'zb_v'"):
        placement_of(turned, CHAIN)
    with pytest.raises(ScheduleError, match="there is no schedule"):
        placement_of(replace(plan, schedule="2f2b"), CHAIN)


def test_plans_for_others_are_refused(mlp: Captured, plan: Plan) -> None:
    plan.check(mlp.graph, LINE)
    with pytest.raises(PlanMismatchError, match="another model"):
        plan.check(replace(mlp.graph, name="another"), LINE)
    with pytest.raises(PlanMismatchError, match="another mesh"):
        plan.check(mlp.graph, Mesh.parse(f"{DEVICE}: gpu=2"))


def sliced(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    part = Call(torch.nn.Identity(), args, kwargs).microbatch(count)
    return part.args, part.kwargs


def test_microbatches_are_slices() -> None:
    batch = {"x": torch.arange(6.0).reshape(6, 1), "deep": [torch.arange(6), {"n": 3}]}
    args, kwargs = sliced((torch.ones(()),), batch, 3)
    assert args[0].shape == ()
    assert kwargs["x"].tolist() == [[0.0], [1.0]]
    assert kwargs["deep"][0].tolist() == [0, 1]
    assert kwargs["deep"][1] == {"n": 3}
    with pytest.raises(BatchError, match="'x' does not divide into 4 microbatches"):
        sliced((), batch, 4)
    with pytest.raises(BatchError, match="'weights' does not belong to the batch"):
        sliced((), {"x": torch.zeros(8, 2), "weights": torch.zeros(2)}, 2)
    empty = Call.of(torch.nn.Linear(2, 2), {"input": torch.zeros(0, 2)})
    with pytest.raises(BatchError, match="the batch has no samples"):
        capture_call(empty, Options(), Trace(None))


def test_on_one_device_it_is_gradient_accumulation() -> None:
    """Two stages in turns on one rank, against torch, without any process group."""
    torch.manual_seed(0)
    model, batch = models.mlp((8, 16, 16, 8), batch=8)
    model, batch = model.double(), {"x": batch["x"].double()}
    program = autopar.compile(
        model,
        f"{DEVICE}: gpu=1",
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        loss_fn=models.squared_error,
        stages=2,
        microbatches=4,
        schedule="zb_v",
        example_inputs=batch,
    )
    whole = program(**batch)
    torch.testing.assert_close(whole, model(**batch))
    loss = program.step(**batch)
    updates = torch.optim.SGD(model.parameters(), 0.1)
    total = 0.0
    for x in batch["x"].chunk(4):
        part = models.squared_error(model(x), x) / 4
        part.backward()
        total += part.item()
    updates.step()
    assert abs(float(loss) - total) < 1e-12
    for name, value in program.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])
    program.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert all(not value.any() for value in program.state_dict().values())
    with pytest.raises(BatchError, match="the input 'x' is f64"):
        program.step(x=batch["x"][:4])


def test_beside_a_long_piece_the_other_stages_are_even() -> None:
    """Ten blocks of a second and a head of three seconds."""
    edges = np.array([0.0, *(float(end) for end in range(1, 11)), 13.0])
    nbytes = np.array([0.0, *([1e6] * 10), 0.0])
    for wanted in ([1.0] * 10 + [3.0], [2.0] * 5 + [3.0], [3.0] * 3 + [4.0]):
        most = planning._slowest(edges, len(wanted)) * (1 + planning._SLACK)
        cuts = planning._cheapest_cuts(edges, nbytes, len(wanted), most)
        assert sorted(np.diff([0.0, *edges[cuts], 13.0])) == wanted


def test_no_stage_begins_where_nothing_trained_crosses() -> None:
    """A long loss leaves room for more stages, none of which is behind it."""
    torch.manual_seed(0)
    model, batch = models.gpt2(layers=4)
    captured = capture_call(Call(model, (), batch), Options(), Trace(None), 4)
    seconds, _ = planning.weights(
        captured.graph, prepare(captured.graph, passes=FINDING), LINE, Options()
    )
    crossing = dict(zip(seconds, planning._crossing(captured.graph, list(seconds)), strict=True))
    for stages in (2, 4, 6):
        ends = even_ends(captured.graph, stages, LINE, Options())
        assert all(crossing[end] > 0 for end in ends)
        assert not any(captured.graph[end].type.shape == () for end in ends)

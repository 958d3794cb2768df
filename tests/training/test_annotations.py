"""Annotated models are planned as annotated, by search and by propagation, and train correctly."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import autopar
from autopar.capture.capture import Captured
from autopar.cli import main
from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.errors import InfeasibleError, PlanError, ProblemError
from autopar.intra_op import legal
from autopar.intra_op.pins.dims import find_dims
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support.annotated import MEGATRON, Batch, gpt
from tests.support.patterns import communication
from tests.support.ranks import run_ranks

# So quick that what no annotation decides is not worth splitting.
MESH = Mesh.parse("cpu[1TFLOP/s 64GiB 1TB/s]: data=2 @10GB/s 1us, tensor=2 @10GB/s 1us")


@dataclass(frozen=True)
class Planned:
    """A planned model: what was captured, and its plan."""

    captured: Captured
    plan: autopar.Plan

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def cost(self) -> float:
        return self.plan.predicted.step_seconds

    def annotated(self) -> list[Node]:
        return [node for node in self.graph.folded if node.op == "autopar.shard"]


def planned(model: nn.Module, batch: Batch, mesh: Mesh = MESH, solver: str = "ilp") -> Planned:
    options, nothing = Options(solver=solver), Trace(None)
    captured = capture_graph(model, (), batch, options, nothing)
    return Planned(captured, Plan.of(make_plan(captured.graph, mesh, options, nothing)))


@cache
def megatron() -> Planned:
    return planned(*gpt(MEGATRON))


def test_every_annotated_value_is_held_as_annotated() -> None:
    found = megatron()
    layouts = [str(found.plan.stage.nodes[node.name]) for node in found.annotated()]
    assert len(found.graph.repeats) == 1
    stream, heads = "[8@data, 16, 32]", "[8@data, 16, 32@tensor]"
    hidden = "[8@data, 16, 128@tensor]"
    assert layouts == [f"{each} -> {each}" for each in (heads, stream, hidden, stream)]


def test_nothing_of_an_annotation_is_left_in_the_program(tmp_path: Path) -> None:
    found = megatron()
    found.plan.save(tmp_path / "plan.toml")
    loaded = autopar.Plan.load(tmp_path / "plan.toml")
    legal.check(found.graph, loaded.stage, table())
    price = AnalyticModel(MESH).collective
    source = emit(found.graph, loaded.stage, price)
    assert source == emit(found.graph, found.plan.stage, price)
    assert "autopar.shard" not in re.sub(r"#.*", "", source)


def test_a_plan_edited_against_an_annotation_is_refused_at_the_user_s_line() -> None:
    found = megatron()
    text = found.plan.to_toml()
    node = found.annotated()[0]
    line = f"{node.name} = "
    assert text.count(line) == 1
    edited = re.sub(f"{line}.*", f'{line}"[8, 16, 32] -> [8, 16, 32]"', text)
    with pytest.raises(PlanError, match=node.name) as caught:
        legal.check(found.graph, autopar.Plan.from_toml(edited).stage, table())
    assert "annotated.py" in caught.value.where


class Perceptron(nn.Module):
    """Two layers, with annotations of a weight and of the value between."""

    def __init__(self, weight: str, between: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.weight, self.between = weight, between

    def forward(self, x: Tensor) -> Tensor:
        weight = autopar.shard(self.first.weight, self.weight) if self.weight else self.first.weight
        y = torch.nn.functional.linear(x, weight).relu()
        return self.second(autopar.shard(y, self.between)).sum()


def perceptron(weight: str, between: str) -> Planned:
    return planned(Perceptron(weight, between), {"x": torch.randn(64, 16)})


def test_a_weight_may_be_annotated() -> None:
    found = perceptron("[32@tensor, 16] -sum(data)", "[b@data, f@tensor]")
    (weight, _) = found.annotated()
    assert found.graph[weight.inputs[0]].alias == "first_weight"
    assert str(found.plan.stage.nodes[weight.name]).endswith("-> [32@tensor, 16] -sum(data)")


def test_an_open_dimension_is_as_cheap_as_the_cheapest_way_to_close_it() -> None:
    closed = ["[b@data, f]", "[b@data@tensor, f]", "[b@data, f@tensor]"]
    costs = [perceptron("", each).cost() for each in closed]
    assert perceptron("", "[?@data, ?]").cost() == pytest.approx(min(costs))
    assert perceptron("", "[?@data, f]").cost() == pytest.approx(min(costs[:2]))
    assert len(set(costs)) > 1


BATCH = {"input": "[b@data@tensor, s, h]"}
COLUMNS, ROWS = ("q", "k", "v", "up"), ("o", "down")


def used(found: Planned) -> dict[str, Layout]:
    """How each parameter is used, by its name within its block or in the model.

    Without that of the positions, which come from no batch.
    """
    shares = {
        found.graph[node.inputs[0]].target: found.plan.stage.nodes[node.name].results[0][1]
        for node in found.graph.folded
        if node.op == "autopar.share" and found.graph[node.inputs[0]].op == "param"
    }
    del shares["places.weight"]
    return {name.removeprefix("blocks.0."): layout for name, layout in shares.items()}


def source(found: Planned) -> str:
    return emit(found.graph, found.plan.stage, AnalyticModel(found.plan.mesh).collective)


@cache
def followed(kind: str) -> Planned:
    notes = {"megatron": MEGATRON, "batch": BATCH}[kind]
    return planned(*gpt(notes), solver="propagate")


def test_three_annotations_a_block_make_it_megatron_s() -> None:
    """Four all_reduces over tensor a block, two forwards and two backwards, and no more."""
    found = followed("megatron")
    for name, layout in used(found).items():
        module = name.partition(".")[0]
        dims: list[tuple[str, ...]] = [() for _ in layout.dims]
        if module in COLUMNS:
            dims[0] = ("tensor",)
        elif module in ROWS and len(dims) == 2:
            dims[1] = ("tensor",)
        assert layout.dims == tuple(dims), name
        assert "data" in layout.varying, name
    sync = {("to_varying", ("data",)): len(dict(gpt(MEGATRON)[0].blocks[0].named_parameters()))}
    moves = {("to_varying", ("tensor",)): 2, ("all_reduce", ("tensor",)): 2}
    assert dict(communication(source(found))) == sync | moves


def test_one_annotation_of_the_input_splits_the_batch_everywhere() -> None:
    found = followed("batch")
    for name, layout in used(found).items():
        assert (layout.sharded_axes, set(layout.varying)) == ((), {"data", "tensor"}), name
    for node in found.graph.folded:
        if node.requires_grad and node.type.shape[:2] == (8, 16):
            assert found.plan.stage.nodes[node.name].results[0][1].dims[0] == ("data", "tensor"), (
                node
            )
    # Parameters and their gradients are sent, nothing else.
    assert {name for name, _ in communication(source(found))} <= {"to_varying", "all_gather"}


@pytest.mark.parametrize("kind", ["megatron", "batch"])
def test_a_search_under_the_same_annotations_is_no_worse(kind: str) -> None:
    notes = {"megatron": MEGATRON, "batch": BATCH}[kind]
    best = megatron() if kind == "megatron" else planned(*gpt(notes))
    assert best.cost() <= followed(kind).cost() * (1 + 1e-9)


def losses(found: Planned | None) -> tuple[list[float], Batch]:
    """Four steps of SGD: on this rank by autopar as planned, without a plan by torch alone."""
    model, batch = gpt({})
    if found is not None:
        compiler = importlib.import_module("autopar.session.compiler")
        with patch.object(compiler, "capture_parts", lambda *_: found.captured):
            program = autopar.compile(
                model,
                MESH,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                plan=found.plan,
                example_inputs=batch,
            )
        return [program.step(**batch).item() for _ in range(4)], program.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values, model.state_dict()


def train(jobs: list[Planned]) -> list[tuple[list[float], Batch]]:
    return [losses(job) for job in jobs]


def test_annotated_models_train_as_unannotated_ones() -> None:
    whole, weights = losses(None)
    jobs = [followed("megatron"), megatron(), followed("batch")]
    for rank in run_ranks(train, jobs):
        for found, state in rank:
            assert found == pytest.approx(whole, rel=1e-9)
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


def test_what_propagation_leads_to_is_refused_if_it_does_not_fit() -> None:
    model, batch = Perceptron("", "[b@data@tensor, f]"), {"x": torch.randn(8, 16)}
    peak = planned(model, batch, solver="propagate").plan.predicted.peak_bytes
    options = {"example_inputs": batch, "memory": 0.8 * peak}
    with pytest.raises(InfeasibleError, match="found by propagation"):
        autopar.plan(model, MESH, solver="propagate", **options)
    assert autopar.plan(model, MESH, **options).predicted.peak_bytes <= 0.8 * peak


def test_a_solver_that_is_none_is_refused_with_those_that_are() -> None:
    for call in (autopar.plan, autopar.compile):
        with pytest.raises(ProblemError, match="'simplex'") as caught:
            call(nn.Linear(2, 2), "cpu: gpu=1", example_inputs=3, solver="simplex")
        assert {"ilp", "propagate"} <= set(re.findall(r"\w+", caught.value.why))


def test_the_command_line_takes_a_solver(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.support.annotated import MEGATRON, gpt\n"
        "def model():\n    return gpt(MEGATRON)\n"
    )
    call = ["plan", f"{file}:model", "--mesh", str(MESH), "-o", str(tmp_path / "plan.toml")]
    found = CliRunner().invoke(main, [*call, "--solver", "propagate"])
    assert found.exit_code == 0, found.output
    assert (
        autopar.Plan.load(tmp_path / "plan.toml").stage.nodes
        == followed("megatron").plan.stage.nodes
    )
    refused = CliRunner().invoke(main, [*call, "--solver", "simplex"])
    assert refused.exit_code != 0
    assert "propagate" in refused.output


def test_an_annotation_does_not_part_the_dimensions_that_names_speak_of() -> None:
    graph = megatron().graph
    dims = find_dims(graph, table())
    for node in megatron().annotated():
        assert dims.of(node.name) == dims.of(node.inputs[0])
    assert dims.of("shard_1") != dims.of("shard")

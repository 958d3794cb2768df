"""Annotated models: planned as they say, emitted without a trace of it, trained as unannotated."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.errors import PlanError
from autopar.intra_op import legal
from autopar.intra_op.table import table
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from tests.annotated import MEGATRON, Batch, gpt

MESH = Mesh.parse("cpu: data=2, tensor=2")


@dataclass(frozen=True)
class Planned:
    """A planned model: its graph and its plan."""

    graph: Graph
    plan: autopar.Plan

    def cost(self) -> float:
        return self.plan.predicted["step_seconds"]

    def annotated(self) -> list[Node]:
        return [node for node in self.graph.folded if node.op == "autopar.shard"]


def planned(model: nn.Module, batch: Batch, mesh: Mesh = MESH, solver: str = "ilp") -> Planned:
    compiler = importlib.import_module("autopar.compile")
    options, nothing = compiler.Options(solver=solver), compiler.Trace(None)
    graph = compiler.capture_graph(model, (), batch, options, nothing).graph
    return Planned(graph, compiler.make_plan(graph, mesh, options, nothing))


@cache
def megatron() -> Planned:
    return planned(*gpt(MEGATRON))


def test_every_annotated_value_is_held_as_annotated() -> None:
    found = megatron()
    layouts = [str(found.plan.nodes[node.name]) for node in found.annotated()]
    assert len(found.graph.repeats) == 1
    stream, heads = "[8@data, 16, 32]", "[8@data, 16, 32@tensor]"
    hidden = "[8@data, 16, 128@tensor]"
    assert layouts == [f"{each} -> {each}" for each in (heads, stream, hidden, stream)]


def test_nothing_of_an_annotation_is_left_in_the_program(tmp_path: Path) -> None:
    found = megatron()
    found.plan.save(tmp_path / "plan.toml")
    loaded = autopar.Plan.load(tmp_path / "plan.toml")
    legal.check(found.graph, loaded, table())
    price = AnalyticModel(MESH).collective
    source = emit(found.graph, loaded, price)
    assert source == emit(found.graph, found.plan, price)
    assert "autopar.shard" not in re.sub(r"#.*", "", source)


def test_a_plan_edited_against_an_annotation_is_refused_at_the_user_s_line() -> None:
    found = megatron()
    text = found.plan.to_toml()
    node = found.annotated()[0]
    line = f"{node.name} = "
    assert text.count(line) == 1
    edited = re.sub(f"{line}.*", f'{line}"[8, 16, 32] -> [8, 16, 32]"', text)
    with pytest.raises(PlanError, match=node.name) as caught:
        legal.check(found.graph, autopar.Plan.from_toml(edited), table())
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
    assert str(found.plan.nodes["first_weight_share"]).endswith("[32@tensor, 16] -sum(data)")


def test_an_open_dimension_is_as_cheap_as_the_cheapest_way_to_close_it() -> None:
    closed = ["[b@data, f]", "[b@data@tensor, f]", "[b@data, f@tensor]"]
    costs = [perceptron("", each).cost() for each in closed]
    assert perceptron("", "[?@data, ?]").cost() == pytest.approx(min(costs))
    assert perceptron("", "[?@data, f]").cost() == pytest.approx(min(costs[:2]))
    assert len(set(costs)) > 1

"""Pins of a model reach the stages that contain their names."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.errors import PinError
from autopar.intra_op.pins.layout_pins import Pins
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.pins import data_parallel, megatron
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines import stages
from autopar.planning.pipelines.stage_pins import stage_pins
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.plan_model import plan_evenly
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support import models

MESH = Mesh.parse("H100: gpu=2")


@pytest.fixture(scope="module")
def gpt2() -> tuple[Graph, tuple[Graph, ...]]:
    """GPT-2 in five stages of which the first has no linear and some are cut inside a block."""
    torch.manual_seed(0)
    model, batch = models.gpt2(layers=4)
    graph = capture_call(Call(model, (), batch), Options(), Trace(None), 2).graph
    last = {node.source.module: node.name for node in graph.nodes if not node.is_leaf}
    first = next(node.name for node in graph.nodes if node.op == "aten.embedding")
    ends = [first, last["transformer.h.0.attn.c_proj"], last["transformer.h.2"], last["lm_head"]]
    return graph, stage_graphs(graph, ends, Trace(None))


def test_a_word_speaks_of_the_whole_model(gpt2: tuple[Graph, tuple[Graph, ...]]) -> None:
    """Every linear of every block is split as Megatron splits it, wherever the cuts are."""
    graph, parts = gpt2
    found = stage_pins(graph, parts, [MESH] * 5, Options(pins=megatron("gpu")))
    told = {}
    for part, pins in zip(parts, found, strict=True):
        fixed = Pins(part, pins)
        for node in part.nodes:
            if node.op != "param" or not part.users[node.name]:
                continue
            share = part[part.template[part.users[node.name][0]]]
            for key, pin in fixed.pins:
                if key in fixed.names[share.name]:
                    told.setdefault(node.target, set()).add(pin.layout.dims)
    for block in range(4):
        name = f"transformer.h.{block}"
        assert told[f"{name}.attn.c_attn.weight"] == {((), ("gpu",))}
        assert told[f"{name}.attn.c_proj.weight"] == {(("gpu",), ())}
        assert told[f"{name}.mlp.c_fc.weight"] == {((), ("gpu",))}
        assert told[f"{name}.mlp.c_proj.weight"] == {(("gpu",), ())}


def test_layouts_by_name_go_where_the_name_is(gpt2: tuple[Graph, tuple[Graph, ...]]) -> None:
    graph, parts = gpt2
    pins = {"transformer.wpe.weight": "[32, 32]", "transformer.h.*.mlp.c_fc.bias": "[128]"}
    said = [pins, data_parallel("gpu")]
    found = stage_pins(graph, parts, [MESH] * 5, Options(pins=said))
    holds = [{key for key in pins if key in told} for told in found]
    wpe, bias = pins
    assert holds == [set(), {wpe}, {bias}, {bias}, set()]
    assert stage_pins(graph, parts, [MESH] * 5, Options()) == [{}] * 5


def test_refusals(gpt2: tuple[Graph, tuple[Graph, ...]]) -> None:
    graph, parts = gpt2
    with pytest.raises(PinError, match="name nothing: nowhere"):
        stage_pins(graph, parts, [MESH] * 5, Options(pins={"nowhere": "[4]"}))
    with pytest.raises(PinError, match="is not a pin"):
        stage_pins(graph, parts, [MESH] * 5, Options(pins=[3]))  # type: ignore[list-item]


def test_stages_that_are_pinned_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is that of stages planned one by one. A pin on one of them makes it different."""
    model, batch = models.gpt2(layers=4)
    mesh, made = Mesh.parse("H100: node=4, gpu=2"), list[Graph]()
    graph = capture_call(Call(model, (), batch), Options(), Trace(None), 2).graph

    def counted(part: Graph, *args: object) -> object:
        made.append(part)
        return make_plan(part, *args)  # type: ignore[arg-type]

    def planned(*pins: object) -> tuple[Plan, int]:
        options = Options(stages=4, microbatches=2, pins=pins)  # type: ignore[arg-type]
        made.clear()
        return plan_evenly(graph, mesh, options, Trace(None)), len(made)

    monkeypatch.setattr(stages, "make_plan", counted)
    shared, times = planned(megatron("gpu"))
    whole = {"transformer.h.2.mlp.c_fc.weight": "[32, 128]"}
    pinned, more = planned(whole)
    assert [bool(stage.pins) for stage in pinned.stages] == [False, False, True, False]
    numbers = itertools.count()
    monkeypatch.setattr(stages, "spoken", lambda part, pins: (("", (next(numbers),)),))
    alone, each = planned(megatron("gpu"))
    assert (times, more, each) == (3, 4, 4)
    assert shared == alone

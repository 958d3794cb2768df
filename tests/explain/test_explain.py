"""An explanation adds up to the planner's figures, and lists all that the emitted program does."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from autopar.cli.explain import explained
from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.explain import (
    PARTS,
    VIEWS,
    Cost,
    Explanation,
    StepFigures,
    explain,
    moves,
    render,
    repriced,
    view,
)
from autopar.explain.layer_names import OUTSIDE, layers
from autopar.intra_op.build import Built, build, layouts
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Node, Ref, Source
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import TensorType
from autopar.ir.units import format_bytes, format_seconds
from autopar.pins import form
from autopar.plan_entries import NodePlan, Prediction
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.support.models import MODELS

# Slow devices and fast links: the best plan of a small model splits and communicates.
MESH = Mesh.parse("slow[10GFLOP/s 1GiB 1GB/s]: node=2 @10GB/s 1us, gpu=2 @50GB/s 1us")


@cache
def built(name: str) -> tuple[Graph, Built]:
    model, batch = MODELS[name](layers=3)
    graph = capture_graph(model, (), batch, Options(), Trace(None)).graph
    return graph, build(graph, MESH, AnalyticModel(MESH), rules())


@cache
def planned(name: str, seed: int | None) -> tuple[Graph, StagePlan]:
    """The best plan, or one of random choices, with the planner's figures."""
    graph, problem = built(name)
    if seed is None:
        choice = solve(problem.problem, gap=0.0).choice
    else:
        draw = random.Random(seed)
        choice = tuple(draw.randrange(len(options)) for options in problem.options)
    figures = problem.figures(choice)
    return graph, StagePlan(
        fingerprint(graph), MESH, layouts(problem, graph, choice), predicted=figures
    )


@pytest.mark.parametrize("how", ["full 3", "selective 2"])
def test_what_is_computed_again_is_listed(how: str) -> None:
    graph, _ = planned("llama", None)
    plan = make_plan(graph, MESH, Options(memory=1e12, recompute=how), Trace(None))
    found, said = explained(graph, plan, 1e12), plan.predicted
    assert sum(found.seconds.values()) == pytest.approx(said.step_seconds, rel=1e-9)
    activations = found.memory["activations"]
    assert activations == pytest.approx(said.activation_bytes, rel=1e-9)
    held = sum(found.memory.values()) - activations
    assert held == pytest.approx(said.parameter_bytes, rel=1e-9)


@cache
def told(name: str, seed: int | None) -> Explanation:
    return explained(*planned(name, seed), 1e9)


def loss_seconds(explanation: Explanation) -> float:
    operators = [o for s in explanation.sections for line in s.lines for o in line.operators]
    return sum(m.seconds for o in operators for m in o.after if not m.reader)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_listed_adds_up_to_the_prediction(name: str, seed: int | None) -> None:
    graph, plan = planned(name, seed)
    assert [repeat.count for repeat in graph.repeats] == [3]
    found, said = explained(graph, plan, 1e9), plan.predicted
    seconds, loss = found.seconds, loss_seconds(found)
    listed = seconds["activations"] + seconds["parameters"] - loss
    causes = ("parameter_seconds", "reshard_seconds", "exchange_seconds")
    expected = sum(getattr(said, cause) for cause in causes)
    assert listed > 0
    assert listed == pytest.approx(expected, rel=1e-9)
    # The planner counts the sum of the loss among the seconds of operators.
    assert seconds["compute"] + loss == pytest.approx(said.compute_seconds, rel=1e-9)
    assert sum(seconds.values()) == pytest.approx(said.step_seconds, rel=1e-9)
    saved = found.memory["activations"]
    assert saved == pytest.approx(said.activation_bytes, rel=1e-9)
    held = sum(found.memory.values()) - saved
    assert held == pytest.approx(said.parameter_bytes, rel=1e-9)
    assert not found.stale


def test_choices_of_equal_layouts_are_told_apart_by_their_forms() -> None:
    graph, problem = built("gpt2")
    best = solve(problem.problem, gap=0.0).choice
    groups: dict[object, list[int]] = {}
    for place, options in enumerate(problem.options):
        for index, option in enumerate(options):
            groups.setdefault((place, option.operands, option.results), []).append(index)
    (at, *_), alike = max(groups.items(), key=lambda item: len(item[1]))  # type: ignore[misc]
    assert len(alike) > 2
    computed = set()
    for index in alike:
        choice = (*best[:at], index, *best[at + 1 :])
        entries, said = layouts(problem, graph, choice), problem.figures(choice)
        found = explained(graph, StagePlan(fingerprint(graph), MESH, entries), 1e9)
        assert sum(found.seconds.values()) == pytest.approx(said.step_seconds, rel=1e-9)
        computed.add(said.compute_seconds)
    assert len(computed) > 1


def test_what_turns_of_a_form_hide_is_counted_once() -> None:
    """Panels of a linear on a grid overlap with its products, as in the planner's price."""
    graph, _ = planned("gpt2", None)
    grid = Mesh.parse("H100: node=2, gpu=2")
    options = Options(memory=1e12, pins=form("*.attn.c_proj", "2d"))
    plan = make_plan(graph, grid, options, Trace(None))
    assert any(entry.form == "2d" for entry in plan.nodes.values())
    found = explained(graph, plan, 1e12)
    assert found.step == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert not found.stale


@pytest.mark.parametrize("by", VIEWS)
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_view_adds_up_to_the_prediction(name: str, seed: int | None, by: str) -> None:
    rows, said = view(told(name, seed), by), planned(name, seed)[1].predicted
    assert len(rows) > 2
    assert len({row.name for row in rows}) == len(rows)
    assert sum(row.time for row in rows) == pytest.approx(said.step_seconds, rel=1e-12)
    held = said.parameter_bytes + said.activation_bytes
    assert sum(row.held for row in rows) == pytest.approx(held, rel=1e-9)


@pytest.mark.parametrize("seed", [None, 0])
def test_views_count_what_the_program_sends(seed: int | None) -> None:
    graph, plan = planned("gpt2", seed)
    listed = moves(graph, plan, AnalyticModel(MESH).collective)
    for by, key in (("collective", "kind"), ("axis", "axes")):
        sent: Counter[str] = Counter()
        for move in listed:
            for call in move.calls:
                value = getattr(call, key)
                name = value if by == "collective" else ", ".join(value)
                sent[name] += move.times * call.nbytes
        rows = view(told("gpt2", seed), by)
        assert {row.name: row.sent for row in rows if row.sent} == sent
        assert sum(row.calls for row in rows) == sum(m.times * len(m.calls) for m in listed)


def test_memory_by_axis_is_that_of_the_shards() -> None:
    """Parameters, gradients and optimizer state have the layouts that the plan states."""
    graph, plan = planned("llama", None)
    expected: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "param":
            continue
        (_, layout), *_ = plan.nodes[graph.template[node.name]].results
        devices = math.prod(MESH.axis_size(axis) for axis in layout.sharded_axes)
        # Sizes divide evenly; AdamW holds two values beside the parameter and its gradient.
        expected[", ".join(layout.sharded_axes)] += 4 * node.type.nbytes // devices
    rows = view(told("llama", None), "axis")
    kept = ("parameters", "gradients", "optimizer")
    held = {row.name: sum(row.memory.get(cause, 0.0) for cause in kept) for row in rows}
    assert {name: nbytes for name, nbytes in held.items() if nbytes} == expected


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_edited_plan_has_the_figures_of_its_layouts(name: str, seed: int | None) -> None:
    graph, plan = planned(name, seed)
    edited = replace(
        plan, predicted=Prediction(**{k: 3 * v for k, v in vars(plan.predicted).items()})
    )
    found = explained(graph, edited, 1e9)
    assert found.stale
    figures = repriced(found, graph)
    for figure, value in vars(figures).items():
        expected = found.peak if figure == "peak_bytes" else getattr(plan.predicted, figure)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9 * figures.step_seconds)
    assert repriced(told(name, seed), graph) == plan.predicted


def test_layers_are_blocks_with_their_numbers() -> None:
    found = told("gpt2", None)
    rows = {row.name: row for row in view(found, "layer")}
    assert {"transformer.wte", "transformer.h.0-2 × 3", "transformer.ln_f"} <= set(rows)
    blocks = rows["transformer.h.0-2 × 3"]
    section = next(section for section in found.sections if section.times == 3)
    own = sum(parameter.seconds for parameter in found.parameters if parameter.times == 3)
    assert blocks.time == pytest.approx(section.seconds + own, rel=1e-12)
    # The head's weight is the embedding's, so it is held there.
    assert set(rows["lm_head"].memory) <= {"activations"}


def test_unfolded_layers_are_numbered_modules() -> None:
    def node(name: str, module: str) -> Node:
        made = Node(name, "aten.relu", (Ref("x"),), (), (TensorType("f32", (8,)),))
        return replace(made, source=Source(module))

    modules = {"a": "layer1.0.conv", "b": "layer1.0.bn", "c": "3", "d": "stem.conv1", "e": ""}
    leaf = Node("x", "input", ("x",), (), (TensorType("f32", (8,)),))
    nodes = (leaf, *(node(name, module) for name, module in modules.items()))
    found = layers(Graph("convolutions", nodes, (("e", "e"),)))
    assert [found[name] for name in "abcd"] == ["layer1.0", "layer1.0", "3", "stem.conv1"]
    assert found["e"] == found["x"] == OUTSIDE


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_listed_is_what_the_program_does(name: str, seed: int | None) -> None:
    graph, plan = planned(name, seed)
    price = AnalyticModel(MESH).collective
    # Two readers that want a value in one layout pay for it each; the program keeps it for both.
    once = {(m.value, m.after, m.times, m.inside): m for m in moves(graph, plan, price)}
    listed = Counter(
        (
            call.kind if call.backward or move.inside else "",
            format_bytes(call.nbytes),
            format_seconds(call.seconds),
        )
        for move in once.values()
        for call in move.calls
    )
    note = re.compile(r"  (?:(?:backward |once )?([a-z_]+) )?(\S+ (?:B|[KMG]iB)) (\S+ (?:us|ms|s))")
    body = emit(graph, plan, price).partition('"""\n')[2].partition('"""\n')[2]
    comments = "\n".join(line.partition("#")[2] for line in body.splitlines())
    assert Counter(note.findall(comments)) == listed


def test_a_data_parallel_plan_has_one_all_reduce_a_weight() -> None:
    graph, plan = data_parallel()
    model = AnalyticModel(MESH)
    found = explain(graph, plan, model.collective, {"y": Cost(2.0, 64.0)}, StepFigures(1e6))
    (parameter,) = found.parameters
    expected = model.collective(Collective("all_reduce", ("node", "gpu"), 16 * 16 * 4))
    assert parameter.seconds == pytest.approx(expected)
    assert [call.kind for move in parameter.moves for call in move.calls] == ["all_reduce"]
    assert all(call.backward for move in parameter.moves for call in move.calls)
    assert found.memory == {
        "parameters": 1024, "gathered parameters": 0, "gradients": 1024, "optimizer": 2048,
        "activations": 64.0,
    }  # fmt: skip
    assert found.seconds["compute"] == 2.0
    assert found.seconds["activations"] == 0.0


def data_parallel() -> tuple[Graph, StagePlan]:
    def typed(*shape: int) -> tuple[TensorType, ...]:
        return (TensorType("f32", shape),)

    nodes = (
        Node("w", "param", ("w",), (), typed(16, 16), requires_grad=True),
        Node("x", "input", ("x",), (), typed(8, 16)),
        Node("ws", "autopar.share", (Ref("w"),), (), typed(16, 16), requires_grad=True, alias="w"),
        Node("y", "aten.linear", (Ref("x"), Ref("ws")), (), typed(8, 16), requires_grad=True),
    )
    lines = {
        "w": "[16, 16]",
        "x": "[8, 16]",
        "ws": "[16, 16] -> [16, 16] -sum(node, gpu)",
        "y": "[8@node@gpu, 16]; [16, 16] -sum(node, gpu) -> [8@node@gpu, 16]",
    }
    graph = Graph("linear", nodes, (("y", "y"),))
    entries = {name: NodePlan.parse(line) for name, line in lines.items()}
    return graph, StagePlan(fingerprint(graph), MESH, entries)


def test_lines_are_grouped_by_block_and_source() -> None:
    found = explained(*planned("gpt2", None), 1e9)
    assert [section.times for section in found.sections] == [1, 3, 1]
    block = found.sections[1]
    assert block.title == "transformer.h.*"
    assert any(line.module == "transformer.h.*.mlp.c_fc" for line in block.lines)
    assert all(line.place.partition(":")[0].endswith(".py") for line in block.lines)
    assert {"transformer.h.*.mlp.c_fc.weight", "transformer.wte.weight"} <= {
        parameter.name for parameter in found.parameters
    }
    times = {parameter.name: parameter.times for parameter in found.parameters}
    assert times["transformer.h.*.ln_1.bias"] == 3
    assert times["transformer.ln_f.bias"] == 1
    seconds = [line.seconds for _, line in found.slowest_lines]
    assert seconds == sorted(seconds, reverse=True)
    total = sum(seconds) + found.seconds["parameters"]
    assert total == pytest.approx(sum(found.seconds.values()))


def test_an_edited_plan_is_said_to_be_stale() -> None:
    graph, plan = planned("gpt2", None)
    said = replace(plan.predicted, step_seconds=2 * plan.predicted.step_seconds)
    edited = StagePlan(plan.graph, plan.mesh, plan.nodes, predicted=said)
    found = explained(graph, edited, 1e9)
    assert found.stale
    assert "edited" in text(found)
    assert "edited" not in text(explained(graph, plan, 1e9))


def test_the_text_names_every_collective_and_its_totals() -> None:
    graph, plan = planned("llama", None)
    found = explained(graph, plan, 1e9)
    shown = text(found)
    for move in moves(graph, plan, AnalyticModel(MESH).collective):
        for call in move.calls:
            over = f"{call.kind} over {', '.join(call.axes)}, {format_bytes(call.nbytes)}"
            assert over in shown
    for value in (sum(found.seconds.values()), found.seconds["parameters"]):
        assert format_seconds(value) in shown
    assert format_bytes(sum(found.memory.values())) in shown


def test_a_part_is_shown_alone_and_all_parts_together() -> None:
    found = told("gpt2", None)
    alone = {by: text(found, by) for by in PARTS}
    whole = text(found).splitlines()
    for by, shown in alone.items():
        assert set(map(str.rstrip, shown.splitlines())) <= {line.rstrip() for line in whole}, by
    assert "Time by layer" in alone["layer"]
    assert "Time by layer" not in alone["axis"]
    for by in VIEWS:
        for row in view(found, by):
            assert not row.time or format_seconds(row.time) in alone[by]
            if by != "collective" and row.held:
                assert format_bytes(row.held) in alone[by]


def text(explanation: Explanation, by: str | None = None) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(explanation, by=by))
    return captured.get()

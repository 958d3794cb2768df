"""Plans that the rules allow, and edited ones that they refuse."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from autopar.capture.capture import capture
from autopar.cost.model import AnalyticModel
from autopar.errors import PlanError
from autopar.intra_op import legal
from autopar.intra_op.build import Built, build, layouts
from autopar.intra_op.node_choices import node_options
from autopar.intra_op.problem import frugal
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint, parse_graph
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import prepare
from autopar.plan import Plan
from autopar.plan_entries import NodePlan
from autopar.stage_plan import StagePlan
from tests.intra_op.test_folding import LINE, random_choice
from tests.support.models import MODELS, mlp, squared_error

MESH = Mesh.parse(LINE)
GRID = Mesh.parse("H100: a=2, b=2")


@cache
def planned(name: str) -> tuple[Graph, Built, StagePlan]:
    """A model's graph, its problem and its best plan."""
    if name == "mlp":
        model, batch = mlp()
        graph = prepare(capture(model, (), batch, loss_fn=squared_error).graph)
    else:
        model, batch = MODELS[name]()
        graph = prepare(capture(model, (), batch).graph)
    built = build(graph, MESH, AnalyticModel(MESH), rules())
    return graph, built, plan_of(graph, built, solve(built.problem).choice)


def plan_of(graph: Graph, built: Built, choice: tuple[int, ...], mesh: Mesh = MESH) -> StagePlan:
    return StagePlan(fingerprint(graph), mesh, layouts(built, graph, choice))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt2", "llama")))
        for name in MODELS
    ],
)
def test_every_plan_of_the_solver_is_legal(name: str) -> None:
    graph, built, plan = planned(name)
    legal.check(graph, plan, rules())
    least = sum(frugal(built.problem.nodes)[1].values())
    tight = solve(replace(built.problem, memory_limit=1.1 * least), gap=1e-2)
    legal.check(graph, plan_of(graph, built, tight.choice), rules())
    generator = random.Random(0)
    for _ in range(5):
        choice = random_choice(built.problem, generator)
        legal.check(graph, plan_of(graph, built, choice), rules())


def test_plans_on_two_axes_are_legal_as_written_and_read() -> None:
    graph, _, _ = planned("mlp")
    built = build(graph, GRID, AnalyticModel(GRID), rules())
    generator = random.Random(0)
    for _ in range(20):
        plan = plan_of(graph, built, random_choice(built.problem, generator), GRID)
        legal.check(graph, Plan.from_toml(Plan.of(plan).to_toml()).stage, rules())


def test_each_of_several_equal_operators_is_checked() -> None:
    graph, _, plan = planned("gpt2")
    linears = [node.name for node in graph.folded if node.op == "aten.linear"]
    types = [(graph[name].types, graph[graph[name].inputs[0]].types) for name in linears]
    assert len(set(types)) < len(types)
    for name in linears:
        wrong = replace(plan.nodes[name], form="ring")
        with pytest.raises(PlanError, match=f"of %{name} are not possible"):
            legal.check(graph, replace(plan, nodes={**plan.nodes, name: wrong}), rules())


def edited(name: str, node: str, line: str) -> StagePlan:
    plan = planned(name)[2]
    assert node in plan.nodes
    return replace(plan, nodes={**plan.nodes, node: NodePlan.parse(line)})


def refusal(name: str, node: str, line: str) -> str:
    graph = planned(name)[0]
    with pytest.raises(PlanError) as caught:
        legal.check(graph, edited(name, node, line), rules())
    error = caught.value
    assert f"%{node}" in error.what
    assert error.where
    assert error.todo
    assert line.split(" -> ")[0].split(";")[0] in error.why
    return error.why


def operator(op: str, number: int = 0) -> str:
    graph = planned("mlp")[0]
    return [node.name for node in graph.folded if node.op == op][number]


# The perceptron's layers: 16 -> 32 -> 32 -> 8 on a batch of 8; x: [8, 16].


@pytest.mark.parametrize(
    ("op", "line"),
    [
        ("aten.gelu", "[8@gpu, 32] -> [8, 32]"),  # what is split stays so
        ("aten.gelu", "[8, 32] +sum(gpu) -> [8, 32] +sum(gpu)"),  # not linear
        ("aten.gelu", "[8, 32] -> [8@gpu, 32]"),
        ("aten.linear", "[8, 16]; [32, 16@gpu]; [32] -> [8, 32] +sum(gpu)"),  # one operand of two
        ("aten.linear", "[8, 16@gpu]; [32, 16@gpu]; [32] -> [8, 32]"),  # the sum is lost
        ("aten.linear", "[8, 16@gpu]; [32, 16@gpu]; [32] -> [8, 32] +sum(gpu)"),  # bias 4 times
        ("aten.linear", "[8@gpu, 16]; [32, 16]; [32] -> [8@gpu, 32]"),  # gradients are not summed
        ("aten.linear", "[8, 16]; [32, 16] -> [8, 32]"),  # an operand is missing
        ("aten.linear", "[8@rack, 16]; [32, 16] -sum(rack); [32] -sum(rack) -> [8@rack, 32]"),
        ("aten.linear", "[8, 16]; [32, 16]; [32] -> [8, 32, 1]"),
        ("aten.linear", "[8, 16]; [32, 16]; [32] -> [8, 64]"),
    ],
)
def test_layouts_that_no_strategy_has_are_refused(op: str, line: str) -> None:
    why = refusal("mlp", operator(op), line)
    assert op in why
    assert "whole" in why  # one of the strategies that it names
    assert "@gpu" in why


def test_a_share_uses_its_parameter_as_it_is_stored() -> None:
    name = "layers_0_weight"
    graph, _, _ = planned("mlp")
    (share,) = graph.users[name]
    gathered = edited("mlp", share, "[32@gpu, 16] -> [32, 16] -sum(gpu)")
    stored = replace(gathered, nodes={**gathered.nodes, name: NodePlan.parse("[32@gpu, 16]")})
    legal.check(graph, stored, rules())
    torn = replace(gathered, nodes={**gathered.nodes, name: NodePlan.parse("[32, 16@gpu]")})
    with pytest.raises(PlanError, match=f"%{share}") as caught:
        legal.check(graph, torn, rules())
    assert "=>" in caught.value.why
    # No way of using a parameter leaves it a partial sum.
    why = refusal("mlp", share, "[32, 16] -> [32, 16] +sum(gpu)")
    assert "[32, 16] => [32, 16@gpu]" not in why.partition("its strategies are")[0]


def test_the_order_of_axes_that_are_summed_means_nothing() -> None:
    graph, _, _ = planned("mlp")
    built = build(graph, GRID, AnalyticModel(GRID), rules())
    plan = plan_of(graph, built, tuple(0 for _ in built.names), GRID)
    legal.check(graph, plan, rules())
    linear = operator("aten.linear")
    for axes in ("a, b", "b, a"):
        line = f"[8@a@b, 16]; [32, 16] -sum({axes}); [32] -sum({axes}) -> [8@a@b, 32]"
        made = replace(plan, nodes={**plan.nodes, linear: NodePlan.parse(line)})
        legal.check(graph, made, rules())
    swapped = "[8@b@a, 16]; [32, 16] -sum(a, b); [32] -sum(a, b) -> [8@b@a, 32]"
    made = replace(plan, nodes={**plan.nodes, linear: NodePlan.parse(swapped)})
    with pytest.raises(PlanError, match=f"%{linear}"):
        legal.check(graph, made, rules())


def test_values_with_and_without_gradients_have_choices_of_their_own() -> None:
    """Only a value with a gradient can leave the gradient in parts, to be added up later."""
    graph = parse_graph("""graph 'two'
%a = input('a') : f32[8, 16]
%b = input('b') : f32[8, 16] grad
%one = autopar.share(%a) : f32[8, 16]
%other = autopar.share(%b) : f32[8, 16] grad
""")
    choices = legal._Choices(graph, StagePlan("", GRID, {}), rules())
    without, with_gradient = (choices.of(graph[name], graph[name]) for name in ("one", "other"))
    assert len(without[0]) < len(with_gradient[0])
    for name, (options, _) in (("one", without), ("other", with_gradient)):
        assert options == node_options(graph, graph[name], GRID, rules())[0]


def test_inputs_are_whole() -> None:
    assert "whole" in refusal("mlp", "x", "[8@gpu, 16]")

"""Known optima of small graphs, with expected prices computed by the cost model's functions."""

from __future__ import annotations

import pytest

from autopar.cost.model import AnalyticModel
from autopar.errors import InfeasibleError, UnknownOperatorError
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import Built, build, layouts
from autopar.intra_op.problem import evaluate
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import TensorType

MESH = Mesh.parse("H100: gpu=4 @100GB/s 5us")


def mlp(batch: int, hidden: int, ffn: int, middle: str = "aten.gelu") -> Graph:
    """x -> linear -> gelu -> linear, an input that carries a gradient as in mid-network."""

    def typed(*shape: int) -> tuple[TensorType, ...]:
        return (TensorType("f32", shape),)

    leaves = [
        Node("x0", "param", ("x",), (), typed(batch, hidden), requires_grad=True),
        Node("up", "param", ("up.weight",), (), typed(ffn, hidden), requires_grad=True),
        Node("down", "param", ("down.weight",), (), typed(hidden, ffn), requires_grad=True),
    ]

    def op(name: str, kind: str, args: tuple[str, ...], shape: tuple[int, ...]) -> Node:
        refs = tuple(Ref(a) for a in args)
        saved = args if kind != "autopar.share" else ()
        alias = args[0] if kind == "autopar.share" else None
        return Node(
            name, kind, refs, (), typed(*shape), requires_grad=True, saved=saved, alias=alias
        )

    nodes = [
        op("x", "autopar.share", ("x0",), (batch, hidden)),
        op("up_share", "autopar.share", ("up",), (ffn, hidden)),
        op("down_share", "autopar.share", ("down",), (hidden, ffn)),
        op("h", "aten.linear", ("x", "up_share"), (batch, ffn)),
        op("a", middle, ("h",), (batch, ffn)),
        op("y", "aten.linear", ("a", "down_share"), (batch, hidden)),
    ]
    return Graph("mlp", (*leaves, *nodes), (("y", "y"),))


def best(graph: Graph, limit: float | None = None) -> tuple[Built, dict[str, str]]:
    built = build(graph, MESH, AnalyticModel(MESH), rules(), memory_limit=limit)
    solution = solve(built.problem, gap=0.0)
    judged = evaluate(built.problem, solution)
    assert judged.feasible
    assert judged.cost == pytest.approx(solution.objective, rel=1e-9)
    return built, {n: str(p) for n, p in layouts(built, graph, solution.choice).items()}


def test_a_big_batch_gives_data_parallelism_at_one_all_reduce_a_weight() -> None:
    batch, hidden, ffn = 1 << 18, 64, 256
    built, plan = best(mlp(batch, hidden, ffn))
    assert plan["h"].startswith(f"[{batch}@gpu, {hidden}]")
    assert plan["y"].endswith(f"[{batch}@gpu, {hidden}]")
    index = built.names.index("up_share")
    label = f"[{ffn}, {hidden}] => [{ffn}, {hidden}] -sum(gpu)"
    choice = built.problem.nodes[index].labels.index(label)
    expected = AnalyticModel(MESH).collective(Collective("all_reduce", ("gpu",), ffn * hidden * 4))
    assert built.problem.nodes[index].cost[choice] == pytest.approx(expected, rel=1e-12)


def test_big_weights_give_column_then_row() -> None:
    _, plan = best(mlp(64, 8192, 32768))
    assert plan["up"] == "[32768@gpu, 8192]"
    assert plan["down"] == "[8192, 32768@gpu]"
    assert plan["a"] == "[64, 32768@gpu] -> [64, 32768@gpu]"
    assert plan["y"].endswith("+sum(gpu)")


def test_a_memory_limit_changes_the_plan_and_is_kept() -> None:
    graph = mlp(64, 256, 1024)  # so small that it is cheapest to do everything everywhere
    free = build(graph, MESH, AnalyticModel(MESH), rules())
    first = solve(free.problem, gap=0.0)
    loose = evaluate(free.problem, first)
    tight = build(graph, MESH, AnalyticModel(MESH), rules(), memory_limit=loose.peak - 1)
    second = solve(tight.problem, gap=0.0)
    judged = evaluate(tight.problem, second)
    assert judged.peak <= loose.peak - 1
    assert second.choice != first.choice
    assert judged.cost > loose.cost
    with pytest.raises(InfeasibleError):
        best(graph, limit=1000.0)


def test_an_operator_without_a_rule_runs_whole_or_is_refused() -> None:
    graph = mlp(1024, 64, 256, middle="mylib.mystery")
    built, plan = best(graph)
    assert built.replicated == ("a",)
    assert plan["a"] == "[1024, 256] -> [1024, 256]"
    with pytest.raises(UnknownOperatorError, match="mystery"):
        build(graph, MESH, AnalyticModel(MESH), rules(), Assumptions(unknown_ops="error"))

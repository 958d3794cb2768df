"""Choices on meshes of many axes: those of merged axes, and few enough to plan with."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest

from autopar.cost.model import AnalyticModel
from autopar.intra_op import axis_runs
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import Built, build, layouts
from autopar.intra_op.node_choices import parameter_options
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.intra_op.states import StateChoice
from autopar.intra_op.strategy import Strategy, strategies
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from tests.intra_op.test_build import mlp
from tests.intra_op.test_strategy import resolved

AXES = ("a", "b", "c", "d", "e", "f")
LINEAR = resolved("aten.linear", [(64, 64, 64), (64, 64), (64,)], (64, 64, 64))

STORED = Assumptions(allowed_storages=StateChoice.read("zero1", Mesh.parse("H100: a=2")).storages)


def mesh(axes: int) -> Mesh:
    return Mesh.parse("H100: " + ", ".join(f"{name}=2" for name in AXES[:axes]))


def parts(strategy: Strategy) -> tuple[str, ...]:
    return tuple(part for _, part in strategy.parts)


def test_the_strategies_kept_are_those_of_all_ways_to_merge_the_axes() -> None:
    """Into two axes; and into three if the first splits the batch and the second the sequence."""
    kept = {parts(one) for one in strategies(LINEAR, mesh(4), axis_runs.RUNS)}
    pairs = {parts(one) for one in strategies(LINEAR, mesh(2))}
    few = {(a,) * outer + (b,) * (4 - outer) for a, b in pairs for outer in (1, 2, 3)}
    batch, sequence = LINEAR.rows
    triples = {uses for one in strategies(LINEAR, mesh(3)) if (uses := parts(one))[0] == batch}
    more = {
        (*((batch,) * first), *((sequence,) * second), *((last,) * (4 - first - second)))
        for *rows, last in triples
        if rows == [batch, sequence]
        for first, second in ((1, 1), (1, 2), (2, 1))
    }
    assert kept == few | more
    assert {len(list(groupby(uses))) for uses in more} == {2, 3}
    every = [parts(one) for one in strategies(LINEAR, mesh(4))]
    assert kept < set(every)
    assert len(every) > 4 * len(kept)


def test_the_choices_grow_as_the_square_of_the_number_of_axes_at_most() -> None:
    counts = [len(strategies(LINEAR, mesh(axes), axis_runs.RUNS)) for axes in (3, 4, 5, 6)]
    steps = [after - before for before, after in pairwise(counts)]
    assert len({after - before for before, after in pairwise(steps)}) == 1


def test_data_context_and_tensor_parallelism_lie_beside_each_other() -> None:
    """Attention may split its batch, its sequence and its heads, in the order of the mesh."""
    shape = (64, 64, 64, 64)
    heads = resolved("aten.scaled_dot_product_attention", [shape] * 3, shape)
    kept = {strategy.results[0].dims for strategy in strategies(heads, mesh(4), axis_runs.RUNS)}
    assert (("a",), ("c", "d"), ("b",), ()) in kept


def test_strategies_are_fewer_from_three_axes_on_and_stored_states_from_four() -> None:
    assert [axis_runs.most_runs(mesh(axes)) for axes in (1, 2, 3)] == [None, None, axis_runs.RUNS]
    assert axis_runs.most_runs(Mesh.parse("H100: a=2, b=1, c=2")) is None  # b splits nothing
    tensor = TensorType("f32", (64, 64))
    every, kept = (
        {one.storage for one in parameter_options(tensor, mesh(3), True, runs=runs)}
        for runs in (None, axis_runs.RUNS)
    )
    whole = Layout(((), ()), varying=AXES[:3])
    assert {one for one in every if one and one.used == whole} < kept < every


def test_storages_keep_zero_along_all_axes_and_along_inner_ones() -> None:
    tensor = TensorType("f32", (64, 64))
    kept = {one.label for one in parameter_options(tensor, mesh(4), True, runs=axis_runs.RUNS)}
    every = {one.label for one in parameter_options(tensor, mesh(4), True)}
    assert kept < every
    for axes in ("a b c d", "c d"):
        held = f"[64@{'@'.join(axes.split())}, 64]"
        assert any(label.startswith(held) for label in kept), held
    assert not any(label.startswith("[64@a@c, 64]") for label in kept)


def test_a_state_sharding_of_more_runs_keeps_its_storages() -> None:
    allowed = StateChoice.read("paro-iig over a, c", mesh(4)).storages
    tensor = TensorType("f32", (64, 64))
    kept = parameter_options(tensor, mesh(4), True, allowed, runs=axis_runs.RUNS)
    held = {one.storage.held.dims for one in kept if one.storage is not None}
    assert (("b", "d"), ()) in held


def solved(
    on: Mesh, sizes: tuple[int, int, int] = (64, 256, 1024), pins: dict[str, str] | None = None
) -> tuple[Built, dict[str, str], float]:
    graph = mlp(*sizes)
    built = build(graph, on, AnalyticModel(on), rules(), STORED, pins=pins)
    solution = solve(built.problem, gap=0.0)
    plan = {name: str(entry) for name, entry in layouts(built, graph, solution.choice).items()}
    return built, plan, solution.objective


@pytest.mark.slow
def test_the_optimum_is_that_of_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    on = Mesh.parse("H100: pod=2 @10GB/s 9us, node=2 @25GB/s 5us, gpu=4")
    restricted, _, seconds = solved(on)
    monkeypatch.setattr(axis_runs, "SEVERAL", 4)
    complete, _, best = solved(on)
    assert seconds == pytest.approx(best, rel=1e-12)
    pairs = [sum(edge.cost.size for edge in b.problem.edges) for b in (complete, restricted)]
    assert pairs[0] > 2 * pairs[1]


def test_a_pin_may_use_every_axis_in_its_own_way() -> None:
    pin = "[4@a@c, 4@b@d]"  # four runs
    _, plan, _ = solved(mesh(4), (4, 4, 4), {"%a": pin})
    assert pin in plan["a"]


def test_a_parameter_may_be_used_in_every_way_that_a_pinned_reader_may() -> None:
    """In a product on a grid inside of data parallelism, three axes of a weight differ."""
    used = Layout((("c",), ("b",)), varying=("a",))
    graph, on = mlp(64, 64, 64), mesh(3)
    for pins, there in (({}, False), ({"%h": "by 2d"}, True)):
        built = build(graph, on, AnalyticModel(on), rules(), STORED, pins=pins)
        options = built.options[built.names.index("up_share")]
        assert any(o.storage and o.storage.used == used for o in options) == there

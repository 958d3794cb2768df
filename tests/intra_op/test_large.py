"""The search on large problems: its parts against their definitions, its results against optima."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.cli.prepare import dense_problem
from autopar.intra_op.problem import Choices, Edge, Problem, Solution, evaluate
from autopar.intra_op.reduce import flatten
from autopar.intra_op.solvers import _search, solve
from autopar.intra_op.solvers._integer.closing import close
from autopar.intra_op.solvers._large import search_large, usage_tree
from autopar.intra_op.solvers._large.forest import forest, forests
from autopar.intra_op.solvers._large.multipliers import Multipliers
from autopar.intra_op.solvers._large.usage_tree import usage
from autopar.intra_op.solvers._moves import local
from autopar.intra_op.solvers._search import Search
from tests.intra_op.test_trees import drawn


def spread(seed: int, count: int = 40, chords: int = 25) -> Problem:
    """A problem with cycles whose nodes live at different times, and a limit that binds."""
    rng = np.random.default_rng(seed)
    problem = drawn(seed, count, chords, None)
    starts = rng.integers(0, 30, count)
    lives = [(int(a), int(a + 1 + rng.integers(0, 15))) for a in starts]
    nodes = [replace(v, live=live) for v, live in zip(problem.nodes, lives, strict=True)]
    problem = replace(problem, nodes=tuple(nodes))
    most = evaluate(problem, solve(problem, "ilp")).peak
    least = evaluate(problem, [int(np.argmin(node.memory)) for node in problem.nodes]).peak
    return replace(problem, memory_limit=float(np.floor(0.5 * (most + least))))


def as_python(loop: Any) -> Any:
    """Returns a loop as it is without numba."""
    return getattr(loop, "py_func", loop)


def layered(seed: int, layers: int = 20, width: int = 8, most: int = 10) -> Problem:
    """A U-Net forward and backward: results wait for their gradients, so that memory binds."""
    rng = np.random.default_rng(seed)
    count = 2 * layers * width
    nbytes = np.round(rng.lognormal(14.0, 1.0, count))
    sizes = rng.integers(most // 2, most + 1, count)
    kinds = [rng.integers(0, 4, size) for size in sizes]
    shards = [rng.integers(1, 5, size) for size in sizes]
    ends = {(v, count - 1 - v) for v in range(count // 2)}
    ends |= {(v, count // 2 - 1 - v) for v in range(count // 4) if rng.random() < 0.5}
    for v in range(width, count // 2):
        before = (v // width - 1) * width + rng.choice(width, 2, replace=False)
        ends |= {(u, v) for u in before.tolist()} | {(count - 1 - v, count - 1 - u) for u in before}
    last = {v: max([v, *(b for a, b in ends if a == v)]) for v in range(count)}
    nodes = tuple(
        Choices(
            f"v{v}",
            tuple(map(str, range(sizes[v]))),
            tuple(np.round(nbytes[v] * (0.1 * rng.random(sizes[v]) + 0.3 / 2.0 ** shards[v]))),
            tuple(np.round(nbytes[v] / 2.0 ** shards[v])),
            (v, last[v] + 1),
        )
        for v in range(count)
    )
    edges = []
    for a, b in sorted(ends):
        apart = kinds[a][:, None] != kinds[b]
        less = 0.15 * abs(shards[a][:, None] - shards[b])
        cost = np.where(apart, 0.5 + 0.3 * rng.random(apart.shape), less)
        edges.append(Edge(a, int(b), np.round(nbytes[a] * cost)))
    least = evaluate(Problem("", nodes, (), None), [int(np.argmin(v.memory)) for v in nodes]).peak
    return Problem("layered", nodes, tuple(edges), float(np.floor(1.1 * least)))


@pytest.fixture(scope="module")
def solved() -> list[tuple[Problem, Solution]]:
    problems = [spread(seed) for seed in range(4)]
    return [(problem, solve(problem, "ilp")) for problem in problems]


def test_the_tree_of_usage_follows_changes(
    solved: list[tuple[Problem, Solution]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Python: compiling a function that calls it takes longer than the test.
    monkeypatch.setattr(usage_tree, "_add", as_python(usage_tree._add))
    swap, rng = as_python(usage_tree.swap), np.random.default_rng(0)
    for problem, _ in solved:
        moves = local(flatten(problem))
        choice = np.zeros(len(problem.nodes), dtype=np.int64)
        tree = usage(moves, choice)
        for _ in range(20):
            wanted = np.array([rng.integers(len(node.cost)) for node in problem.nodes])
            for v, pair in enumerate(zip(choice, wanted, strict=True)):
                swap(moves, tree, v, *pair)
            choice = wanted
            assert tree.top[1] == evaluate(problem, choice.tolist()).peak


def test_a_forest_over_a_tree_is_its_optimum() -> None:
    for seed in range(5):
        problem = drawn(seed, 60, 0, None)
        moves, choice = local(flatten(problem)), np.zeros(60, dtype=np.int64)
        forests(moves, forest(moves), moves.cost, choice, 1, seed)
        assert evaluate(problem, choice.tolist()).cost == solve(problem, "ilp").objective


def test_multipliers_bound_every_choice_from_below(solved: list[tuple[Problem, Solution]]) -> None:
    for problem, best in solved:
        multipliers = Multipliers(flatten(problem))
        multipliers.begin()
        for step in range(200):
            multipliers.change(multipliers.choose(), 0.5 * 0.98**step)
            assert multipliers.prove() <= best.objective
        assert multipliers.proof.bound >= best.objective * 0.9
        fitted = multipliers.fitted(multipliers.choose())
        assert fitted is not None
        assert evaluate(problem, fitted.tolist()).feasible


@pytest.mark.parametrize("solver", ["ilp", "auto"])
def test_the_search_on_large_problems_comes_near_the_optimum(
    solver: str, solved: list[tuple[Problem, Solution]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the border set to nothing, small problems take the path of large ones."""
    monkeypatch.setattr(search_large, "LARGE", 0)
    for problem, best in solved[:2]:
        found = solve(problem, solver, time_limit=math.inf, work=0.7, seed=3)
        assert evaluate(problem, found).feasible
        assert found.bound <= best.objective <= found.objective <= 1.02 * best.objective


@pytest.mark.parametrize("solver", ["ilp", "auto"])
def test_what_the_bound_leaves_of_a_large_problem_is_solved_exactly(
    solver: str, solved: list[tuple[Problem, Solution]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The border is just below the whole problem, so that fewer nodes are not large."""
    monkeypatch.setattr(_search, "NEAR", 1.0)
    closed = []
    monkeypatch.setattr(search_large, "close", lambda *given: closed.append(close(*given)))
    proved = 0
    for problem, best in solved:
        closed.clear()
        nodes = Search(problem, math.inf, 0.0, None, work=3.0).core.nodes
        monkeypatch.setattr(search_large, "LARGE", nodes - 1)
        found = solve(problem, solver, time_limit=math.inf, work=3.0)
        assert evaluate(problem, found).feasible
        assert found.bound <= best.objective * (1 + 1e-12)
        if closed:
            proved += 1
            assert found.ended == "proof"
            assert found.objective == pytest.approx(best.objective, rel=1e-6)
            assert found.bound == pytest.approx(best.objective, rel=1e-6)
    assert proved >= 2


def test_more_messages_raise_the_bound_at_the_same_prices(
    solved: list[tuple[Problem, Solution]],
) -> None:
    risen = 0
    for problem, best in solved:
        multipliers = Multipliers(flatten(problem))
        multipliers.choose()
        before = multipliers.prove()
        multipliers.settle(40)
        risen += before < multipliers.prove() <= best.objective
        assert multipliers.proof.bound <= best.objective
    assert risen >= 2


def test_memory_at_a_price_costs_its_bytes_at_every_time(
    solved: list[tuple[Problem, Solution]],
) -> None:
    for problem, _ in solved:
        flat = flatten(problem)
        prices = np.random.default_rng(0).random(len(flat.base))
        expected = flat.cost + flat.table() @ prices
        assert np.allclose(flat.priced(prices), expected, rtol=1e-12)


def test_little_work_suffices_to_come_near_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices of memory are right after few steps, and then beat the solver without them."""
    problem = layered(2)
    local_search = solve(problem, "local_search", time_limit=math.inf, work=0.1)
    monkeypatch.setattr(search_large, "LARGE", 0)
    found = solve(problem, "auto", time_limit=math.inf, work=0.1)
    assert evaluate(problem, found).feasible
    assert found.objective <= min(local_search.objective, 1.05 * found.bound)


def test_choices_that_were_met_are_merged_into_a_better_one() -> None:
    """The best choice of the merged problem fits the whole one, and takes only choices met."""
    for seed in range(3):
        problem = layered(seed)
        search = Search(problem, math.inf, 0.0, None, work=0.3)
        large, multipliers = search_large._Large(search), Multipliers(search.core)
        large.multipliers = multipliers
        multipliers.begin()
        for step in range(20):
            multipliers.change(multipliers.choose(), 0.5 * 0.8**step)
        large._offer(multipliers, multipliers.choose())
        assert large.choice is not None
        before, met = large.price, multipliers.met.copy()
        met[search.core.start[:-1] + large.choice] = True
        large._merge(large.choice)
        assert large.price < before
        assert met[search.core.start[:-1] + large.choice].all()
        assert evaluate(problem, search.expand(large.choice).tolist()).cost == large.price
        assert evaluate(problem, search.expand(large.choice).tolist()).feasible


def test_the_same_seed_gives_the_same_choice(
    solved: list[tuple[Problem, Solution]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work ends the search here, since the clock stands still."""
    monkeypatch.setattr(search_large, "LARGE", 0)
    monkeypatch.setattr("autopar.intra_op.solvers._budget.time.perf_counter", lambda: 0.0)
    problem, _ = solved[0]
    found = [solve(problem, "ilp", time_limit=0.5, seed=1, gap=0.0) for _ in range(2)]
    assert found[0].choice == found[1].choice
    assert found[0].ended == "work"


def test_what_is_compiled_ahead_is_all_that_the_search_runs() -> None:
    """The problem of `autopar prepare` is left whole, and a choice is priced, fitted and kicked."""
    search = Search(dense_problem(), 60.0, 0.0, None, work=0.01)
    assert search.core.nodes == len(search.problem.nodes)
    search_large.large(search)
    assert evaluate(search.problem, search.solution("auto")).feasible

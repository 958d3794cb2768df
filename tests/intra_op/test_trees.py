"""Blocks that are trees are optimised at once; walks end with the best choice on their way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.intra_op.problem import Choices, Edge, Problem, evaluate
from autopar.intra_op.reduce import flatten
from autopar.intra_op.solvers import solve
from autopar.intra_op.solvers._budget import Budget
from autopar.intra_op.solvers._moves import descend, holds, kicks, local
from autopar.intra_op.solvers._search import Search
from autopar.intra_op.solvers._trees import trees


def drawn(seed: int, count: int, chords: int, limit: float | None) -> Problem:
    """A random tree of nodes with up to four choices, and `chords` more edges."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, count)
    nodes = tuple(
        Choices(
            f"v{i}",
            tuple(map(str, range(size))),
            tuple(rng.integers(0, 50, size).astype(float)),
            tuple(rng.integers(0, 20, size).astype(float)),
            (0, 1),
        )
        for i, size in enumerate(sizes)
    )
    ends = {(int(rng.integers(i)), i) for i in range(1, count)}
    while len(ends) < count - 1 + chords:
        a, b = sorted(map(int, rng.choice(count, 2, replace=False)))
        ends.add((a, b))
    edges = tuple(
        Edge(a, b, rng.integers(0, 100, (sizes[a], sizes[b])).astype(float))
        for a, b in sorted(ends)
    )
    return Problem("tree", nodes, edges, limit)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_solve_a_tree(seed: int) -> None:
    """Single changes stop short of the optimum; a block over the whole tree is the optimum."""
    problem = drawn(seed, 60, 0, None)
    best, moves = solve(problem, "ilp"), local(flatten(problem))
    choice, held = np.zeros(60, np.int64), np.zeros(0)
    descend(moves, choice, held, 0.0, 1000)
    before = evaluate(problem, choice.tolist()).cost
    assert before > best.objective
    trees(moves, choice, held, np.zeros(0), 50, 60, 0.0, seed)
    assert evaluate(problem, choice.tolist()).cost == best.objective == best.bound


@pytest.mark.parametrize("deviation", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_with_cycles_and_a_limit_nothing_gets_worse_or_too_large(
    seed: int, deviation: float
) -> None:
    problem = drawn(seed, 60, 30, None)
    most = evaluate(problem, solve(problem, "ilp")).peak
    least = sum(min(node.memory) for node in problem.nodes)
    problem = replace(problem, memory_limit=0.5 * (most + least))
    exact = solve(problem, "ilp")
    moves = local(flatten(problem))
    choice = np.array([int(np.argmin(node.memory)) for node in problem.nodes])
    held = np.zeros(1)
    assert holds(moves, choice, held) == 0
    before = evaluate(problem, choice.tolist()).cost
    for moved in (trees, kicks):
        priced = (np.full(1, 0.5),) if moved is trees else ()
        most = (20,) if moved is trees else ()
        moved(moves, choice, held, *priced, 50, *most, deviation, seed)
        judged = evaluate(problem, choice.tolist())
        assert judged.feasible
        assert judged.peak == held[0]
        assert exact.bound <= judged.cost < before
        before = np.nextafter(judged.cost, np.inf)


def test_a_tree_follows_its_root_where_single_nodes_turn_back() -> None:
    """All nodes of a binary tree agree with their neighbours, on what costs more. A node that is
    kicked turns back before its neighbours could follow; a block turns as a whole.
    """
    count = 15
    nodes = tuple(
        Choices(f"v{i}", ("a", "b"), (1.0, 0.0), (0.0, 0.0), (0, 1)) for i in range(count)
    )
    agree = np.array([[0.0, 9.0], [9.0, 0.0]])
    edges = tuple(Edge((i - 1) // 2, i, agree) for i in range(1, count))
    problem = Problem("agree", nodes, edges, None)
    best = solve(problem, "brute_force").objective
    moves, held = local(flatten(problem)), np.zeros(0)
    kicked, turned = np.zeros(count, np.int64), np.zeros(count, np.int64)
    kicks(moves, kicked, held, 300, 0.0, 0)
    assert evaluate(problem, kicked.tolist()).cost == count > best
    trees(moves, turned, held, np.zeros(0), 20, count, 0.0, 0)
    assert evaluate(problem, turned.tolist()).cost == best


def crowded(seed: int, count: int, chords: int) -> Problem:
    """A drawn problem with memory for a good third of what its choices may take."""
    problem = drawn(seed, count, chords, None)
    memory = [node.memory for node in problem.nodes]
    limit = 0.6 * sum(map(min, memory)) + 0.4 * sum(map(max, memory))
    return replace(problem, memory_limit=limit)


def test_walks_that_may_get_worse_find_what_others_cannot() -> None:
    found = []
    for seed in range(12):
        problem = crowded(seed, 12, 20)
        moves, best = local(flatten(problem)), solve(problem, "ilp", gap=0.0).objective
        for deviation in (0.0, 0.3):
            choice = np.array([int(np.argmin(node.memory)) for node in problem.nodes])
            held = np.zeros(1)
            holds(moves, choice, held)
            kicks(moves, choice, held, 500, deviation, 0)
            judged = evaluate(problem, choice.tolist())
            assert judged.feasible
            found.append(judged.cost == best)
    assert all(found[1::2])
    assert not all(found[::2])


def test_the_same_seed_gives_the_same_choice() -> None:
    problem = crowded(4, 40, 50)
    first, again = (solve(problem, "local_search", seed=3) for _ in range(2))
    assert first.choice == again.choice
    assert evaluate(problem, first).feasible
    assert first.bound <= first.objective


def test_kicks_end_before_the_limit_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def slow(self: Search, rounds: int) -> bool:
        clock[0] += 7.0
        return True  # never idle: only the limit ends it

    monkeypatch.setattr(Search, "shake", slow)
    monkeypatch.setattr(Budget, "elapsed", lambda self: clock[0])
    found = solve(crowded(4, 40, 50), "local_search", time_limit=60.0, gap=0.0)
    assert 40.0 < found.seconds <= 57.0

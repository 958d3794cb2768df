"""Propagation on problems alone: it follows, it is valid, and it never beats the optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Choices, Edge, Problem, Solution, evaluate
from autopar.intra_op.solvers import solve
from tests.intra_op.test_solvers import EXACT, attempt, loose, tight


def test_it_is_valid_and_never_below_the_optimum() -> None:
    found = 0
    for problem in [*map(loose, range(60)), *map(tight, range(30))]:
        best, mine = attempt(problem, "brute_force"), attempt(problem, "propagate")
        if mine is None:
            continue
        assert best is not None, problem.name
        found += 1
        result = evaluate(problem, mine)
        assert result.feasible, problem.name
        assert result.cost == pytest.approx(mine.objective, rel=EXACT), problem.name
        assert mine.objective >= best.objective * (1 - EXACT), problem.name
        assert mine.bound <= best.objective * (1 + EXACT), problem.name
    assert found > 10


def node(name: str, *cost: float, memory: float = 0.0) -> Choices:
    labels = tuple(map(str, range(len(cost))))
    return Choices(name, labels, cost, (memory,) * len(cost), (0, 1))


def unequal(rows: int, columns: int, price: float = 1.0) -> np.ndarray:
    """Equal choices meet for free."""
    return price * (1 - np.eye(rows, columns))


@pytest.mark.parametrize("seed", range(20))
def test_one_decided_node_decides_a_tree_whatever_else_is_cheaper(seed: int) -> None:
    """All edges let equal choices through for free, so all nodes take the choice of the one."""
    rng = np.random.default_rng(seed)
    count, size, at = 12, 4, int(rng.integers(12))
    wanted = int(rng.integers(size))
    nodes = [node(f"v{i}", *rng.random(size)) for i in range(count)]
    nodes[at] = node("decided", 0.0)
    edges = []
    for i in range(1, count):
        matrix = unequal(size, size, 0.01 + rng.random())
        a, b = i, int(rng.integers(i))
        matrix = matrix[[wanted]] if a == at else matrix
        edges.append(Edge(a, b, matrix[:, [wanted]] if b == at else matrix))
    found = solve(Problem("tree", tuple(nodes), tuple(edges), None), "propagate").choice
    assert found == tuple(0 if i == at else wanted for i in range(count))


def follows(problem: Problem) -> Solution:
    return solve(problem, "propagate")


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_what_is_split_spreads_before_what_is_whole(order: tuple[int, ...]) -> None:
    """whole - a - b - c - split: a and c are cheap, b computes much and is cheaper when split.

    Choices are whole, split and split otherwise; at one edge the layout has to change, and it is
    the one between the value that is whole and b, on either side of a.
    """
    work = {"a": 1.0, "b": 100.0, "c": 1.0}
    nodes = [node("whole", 0.0)]
    nodes += [node(name, cost, cost / 2, cost / 2) for name, cost in work.items()]
    nodes.append(node("split", 0.0))
    links = [(0, 1, [0], [0, 1, 2]), (1, 2, [0, 1, 2], [0, 1, 2])]
    links += [(2, 3, [0, 1, 2], [0, 1, 2]), (3, 4, [0, 1, 2], [1])]
    place = {old: new for new, old in enumerate(order)}
    edges = tuple(
        Edge(place[a], place[b], unequal(3, 3, 5.0)[np.ix_(rows, columns)])
        for a, b, rows, columns in links
    )
    problem = Problem("line", tuple(nodes[old] for old in order), edges, None)
    found = follows(problem)
    chosen = {name.name: found.choice[i] for i, name in enumerate(problem.nodes)}
    assert (chosen["b"], chosen["c"]) == (1, 1)
    assert found.objective == solve(problem, "brute_force").objective == 5.0 + 50.0 + 1.0


def test_what_does_not_fit_is_refused_not_searched_for() -> None:
    """The decided node asks for the choice that holds much; another would fit."""
    heavy = Choices("v", ("heavy", "light"), (1.0, 1.0), (8.0, 2.0), (0, 1))
    edge = Edge(0, 1, np.array([[0.0, 3.0]]))
    problem = Problem("memory", (node("decided", 0.0), heavy), (edge,), 4.0)
    with pytest.raises(InfeasibleError, match="propagation") as caught:
        follows(problem)
    assert "peak: 8 bytes, limit: 4" in caught.value.why
    assert solve(problem, "ilp").choice == (0, 1)
    assert follows(replace(problem, memory_limit=8.0)).choice == (0, 0)

"""Nodes with different memory at different times: solvers, evaluation, JSON."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, ProblemError
from autopar.intra_op.contest import format_problem, parse_problem
from autopar.intra_op.problem import Choices, Edge, Problem, evaluate, frugal
from autopar.intra_op.reduce import flatten, reduce
from autopar.intra_op.solvers import solve

TIMES = 5


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to six nodes of up to three choices, each with up to three intervals."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nodes = []
    for i, size in enumerate(rng.integers(1, 4, rng.integers(1, 7))):
        held = []
        for _ in range(rng.integers(1, 4)):
            low, high = sorted(rng.integers(0, TIMES + 1, 2).tolist())
            held.append(((low, high), tuple(rng.integers(0, 8, size).astype(float))))
        cost = tuple(rng.integers(0, 9, size).astype(float))
        (live, nbytes), *more = held
        nodes.append(Choices(f"v{i}", ("",) * size, cost, nbytes, live, tuple(more)))
    edges = [
        Edge(a, b, rng.integers(0, 9, (len(nodes[a].cost), len(nodes[b].cost))).astype(float))
        for a, b in itertools.combinations(range(len(nodes)), 2)
        if rng.random() < 0.5
    ]
    return Problem("drawn", tuple(nodes), tuple(edges), float(rng.integers(0, 40)))


def held(problem: Problem, choice: tuple[int, ...]) -> list[float]:
    """Bytes at each time, one time after the other."""
    return [
        sum(
            nbytes[k]
            for node, k in zip(problem.nodes, choice, strict=True)
            for (low, high), nbytes in ((node.live, node.memory), *node.more)
            if low <= time < high
        )
        for time in range(TIMES)
    ]


def combinations(problem: Problem) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(node.cost)) for node in problem.nodes)))


@given(problems())
@settings(max_examples=40, deadline=None)
def test_solvers_find_what_all_combinations_show(problem: Problem) -> None:
    every = combinations(problem)
    assert problem.memory_limit is not None
    fitting = [c for c in every if max(held(problem, c)) <= problem.memory_limit]
    if not fitting:
        for name in ("ilp", "auto", "brute_force"):
            with pytest.raises(InfeasibleError):
                solve(problem, name)
        return
    least = min(evaluate(problem, choice).cost for choice in fitting)
    for name in ("ilp", "auto", "brute_force"):
        found = solve(problem, name)
        assert found.choice in fitting
        assert found.objective == pytest.approx(least, abs=1e-9)
    with suppress(InfeasibleError):  # it may find none
        assert solve(problem, "greedy").choice in fitting


@given(problems())
@settings(max_examples=40, deadline=None)
def test_evaluate_counts_every_interval(problem: Problem) -> None:
    least, peaks = sum(frugal(problem.nodes)[1].values()), []
    for choice in combinations(problem)[:50]:
        judged = evaluate(problem, choice)
        peaks.append(judged.peak)
        assert judged.peak == max(held(problem, choice))
        assert judged.feasible == (judged.peak <= problem.memory_limit)
        assert flatten(problem).holds(np.array(choice)).max(initial=0.0) == judged.peak
    assert least <= min(peaks)


@given(problems())
@settings(max_examples=40, deadline=None)
def test_the_contests_json_has_the_same_choices(problem: Problem) -> None:
    """Further memory is that of nodes that must agree: same prices, same peaks."""
    read = parse_problem(format_problem(problem))
    assert all(not node.more for node in read.nodes)
    owners = [v for v, node in enumerate(problem.nodes) for _ in node.more]
    for choice in combinations(problem)[:50]:
        full = (*choice, *(choice[v] for v in owners))
        one, other = evaluate(problem, choice), evaluate(read, full)
        assert (one.cost, one.peak, one.feasible) == (other.cost, other.peak, other.feasible)
    roomy = Problem(problem.name, problem.nodes, problem.edges, None)
    split = solve(parse_problem(format_problem(roomy)))
    assert split.objective == pytest.approx(solve(roomy).objective, abs=1e-9)
    assert parse_problem(format_problem(read)) == read


@given(problems())
@settings(max_examples=40, deadline=None)
def test_reductions_keep_every_interval(problem: Problem) -> None:
    try:
        reduced = reduce(problem)
    except InfeasibleError:
        assert all(
            max(held(problem, c)) > (problem.memory_limit or 0) for c in combinations(problem)
        )
        return
    for choice in combinations(reduced.problem)[:50]:
        if evaluate(reduced.problem, choice).cost < np.inf:
            judged = evaluate(problem, reduced.expand(choice))
            assert judged.feasible == evaluate(reduced.problem, choice).feasible


def test_further_memory_is_checked_like_any() -> None:
    for live, nbytes, told in (
        ((0, 1), (1.0,), "differ in length"),
        ((0, 1), (1.0, -1.0), "negative"),
        ((2, 1), (1.0, 1.0), "ends before"),
    ):
        with pytest.raises(ProblemError, match=told):
            Choices("v", ("a", "b"), (1.0, 2.0), (0.0, 0.0), (0, 1), ((live, nbytes),))
    node = Choices("v", ("a", "b"), (1.0, 2.0), (1.0, 2.0), (0, 1), (((1, 2), (3.0, 2.0)),))
    assert not node.lighter(0, 1)
    assert not node.lighter(1, 0)

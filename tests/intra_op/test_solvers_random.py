"""Every solver and the reductions on random problems that hypothesis draws, against brute force."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import FORBIDDEN, Choices, Edge, Problem, Solution, evaluate
from autopar.intra_op.reduce import reduce
from autopar.intra_op.solvers import solve

EXACT = 1e-9
FEW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def problems(draw: Callable[..., int]) -> Problem:
    """Up to 8 nodes of up to 4 choices: whole costs and bytes, so that ties are common; forbidden
    choices and pairs, parallel edges, empty intervals, limits from none to out of reach.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 8))
    costs, forbidden = draw(st.integers(1, 30)), draw(st.sampled_from([0.0, 0.1, 0.4]))
    sizes = rng.integers(1, 5, count)
    nodes = []
    for index, size in enumerate(sizes):
        begin, length = rng.integers(0, 6, 2)
        cost = rng.integers(0, costs, size).astype(float)
        cost[rng.random(size) < forbidden / 4] = FORBIDDEN
        memory = rng.integers(0, 12, size).astype(float)
        live = int(begin), int(begin + length)
        labels = tuple(map(str, range(size)))
        nodes.append(Choices(f"v{index}", labels, tuple(cost), tuple(memory), live))
    edges = []
    for _ in range(draw(st.integers(0, 3 * count)) if count > 1 else 0):
        a, b = map(int, rng.choice(count, 2, replace=False))
        matrix = rng.integers(0, costs, (sizes[a], sizes[b])).astype(float)
        kind = rng.integers(4)
        if kind == 0:  # separable
            matrix = matrix[:, :1] + matrix[:1]
        elif kind == 1:  # each choice of one leaves one of the other
            only = rng.integers(0, sizes[b], sizes[a])
            matrix[np.arange(sizes[b]) != only[:, None]] = FORBIDDEN
        matrix[rng.random(matrix.shape) < forbidden] = FORBIDDEN
        edges.append(Edge(a, b, matrix))
    limit = draw(st.sampled_from([None, *map(float, range(4, 40, 3))]))
    return Problem("random", tuple(nodes), tuple(edges), limit)


def attempt(problem: Problem, solver: str, **options: object) -> Solution | None:
    try:
        return solve(problem, solver, **options)
    except InfeasibleError:
        return None


def check(problem: Problem) -> None:
    best = attempt(problem, "brute_force")
    for solver, exact in (("ilp", True), ("auto", True), ("local_search", False)):
        found = attempt(problem, solver)
        if best is None:
            assert found is None, solver
            continue
        if found is None:
            assert not exact, solver
            continue
        result = evaluate(problem, found)
        assert result.feasible, solver
        assert result.cost == pytest.approx(found.objective, rel=EXACT), solver
        assert found.bound <= best.objective + EXACT * abs(best.objective), solver
        assert found.objective >= best.objective * (1 - EXACT), solver
        if exact:
            assert found.objective == pytest.approx(best.objective, rel=1e-6), solver
            assert found.bound == pytest.approx(best.objective, rel=1e-6), solver


def check_reduction(problem: Problem) -> None:
    best = attempt(problem, "brute_force")
    try:
        reduction = reduce(problem)
    except InfeasibleError:
        assert best is None
        return
    found = attempt(reduction.problem, "brute_force")
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.objective == pytest.approx(best.objective, rel=EXACT)
        back = evaluate(problem, reduction.expand(found.choice))
        assert back.feasible
        assert back.cost == pytest.approx(best.objective, rel=EXACT)


@FEW
@given(problems())
def test_solvers_against_brute_force(problem: Problem) -> None:
    check(problem)


@MANY
@given(problems())
def test_reductions_keep_the_optimum(problem: Problem) -> None:
    check_reduction(problem)


@pytest.mark.slow
@MANY
@given(problems())
def test_solvers_against_brute_force_many(problem: Problem) -> None:
    check(problem)

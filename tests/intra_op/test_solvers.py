"""Solvers and reductions against brute force, and everything against `evaluate`."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autopar.errors import InfeasibleError, MissingDependencyError, ProblemError
from autopar.intra_op.problem import FORBIDDEN, Choices, Edge, Problem, Solution, evaluate
from autopar.intra_op.reduce import critical_times, reduce
from autopar.intra_op.solvers import _search, solve, solvers
from autopar.intra_op.solvers._budget import Budget
from autopar.intra_op.solvers._integer import cbc, integer_program

EXACT = 1e-9  # relative; what is left is the rounding of sums


def loose(seed: int) -> Problem:
    """Up to 8 nodes with all there can be: ties, constant memory, empty intervals, parallel and
    separable edges, forbidden choices and pairs, limits out of reach or none.
    """
    rng = np.random.default_rng(seed)
    seconds, nbytes = 10.0 ** -rng.integers(0, 7), 10.0 ** rng.integers(0, 12)
    count = int(rng.integers(1, 9))
    sizes = rng.integers(1, 5, count)
    nodes = []
    for index, size in enumerate(sizes):
        start = int(rng.integers(0, 8))
        cost = rng.integers(0, 20, size) * seconds
        cost[rng.random(size) < 0.05] = FORBIDDEN
        memory = rng.integers(0, 20, size) * nbytes
        if rng.random() < 0.3:
            memory[:] = memory[0]
        live = start, start + int(rng.integers(0, 6))
        labels = tuple(map(str, range(size)))
        nodes.append(Choices(f"v{index}", labels, tuple(cost), tuple(memory), live))
    edges = []
    for _ in range(int(rng.integers(0, 2 * count + 3)) if count > 1 else 0):
        a, b = map(int, rng.choice(count, 2, replace=False))
        matrix = rng.integers(0, 30, (sizes[a], sizes[b])) * seconds * rng.choice([1.0, 0.73])
        if rng.random() < 0.2:
            matrix = matrix[:, :1] + matrix[:1]
        matrix[rng.random(matrix.shape) < 0.08] = FORBIDDEN
        edges.append(Edge(a, b, matrix))
    limit = None if rng.random() < 0.15 else float(rng.integers(10, 70) * nbytes)
    return Problem(f"loose {seed}", tuple(nodes), tuple(edges), limit)


def tight(seed: int) -> Problem:
    """8 nodes joined closely, where what is cheap holds much memory: reductions do not suffice."""
    rng = np.random.default_rng(seed)
    seconds, nbytes = 10.0 ** -rng.integers(0, 7), 10.0 ** rng.integers(0, 12)
    sizes = rng.integers(2, 4, 8)
    nodes = []
    for index, size in enumerate(sizes):
        start = int(rng.integers(0, 3))
        cost = rng.random(size) * 20
        memory = (30 - np.round(cost) + rng.integers(0, 6, size)) * nbytes
        live = start, start + int(rng.integers(0, 9))
        labels = tuple(map(str, range(size)))
        nodes.append(Choices(f"v{index}", labels, tuple(cost * seconds), tuple(memory), live))
    edges = []
    for _ in range(int(rng.integers(8, 24))):
        a, b = map(int, rng.choice(8, 2, replace=False))
        matrix = rng.random((sizes[a], sizes[b])) * 8 * seconds
        matrix[rng.random(matrix.shape) < 0.08] = FORBIDDEN
        edges.append(Edge(a, b, matrix))
    live_at_2 = [node.memory for node in nodes if node.live[0] <= 2 < node.live[1]]
    limit = sum(rng.choice([min(memory), max(memory)]) for memory in live_at_2)
    return Problem(f"tight {seed}", tuple(nodes), tuple(edges), float(limit))


PROBLEMS = [*map(loose, range(140)), *map(tight, range(60))]


def attempt(problem: Problem, solver: str, **options: object) -> Solution | None:
    try:
        return solve(problem, solver, **options)
    except InfeasibleError:
        return None


@pytest.fixture(scope="module")
def optima() -> list[Solution | None]:
    return [attempt(problem, "brute_force") for problem in PROBLEMS]


def test_brute_force_against_evaluate_one_by_one() -> None:
    small = [p for p in PROBLEMS if np.prod([len(n.cost) for n in p.nodes]) <= 200]
    assert len(small) > 20
    for problem in small:
        every = product(*(range(len(node.cost)) for node in problem.nodes))
        results = [evaluate(problem, choice) for choice in every]
        costs = [result.cost for result in results if result.feasible]
        found = attempt(problem, "brute_force")
        assert (found is None) == (not costs)
        if found is not None:
            assert found.objective == pytest.approx(min(costs), rel=EXACT)
            assert evaluate(problem, found).feasible


def test_ilp_equals_brute_force(optima: list[Solution | None]) -> None:
    steps: list[str] = []
    for problem, best in zip(PROBLEMS, optima, strict=True):
        found = attempt(problem, "ilp", gap=0.0, progress=steps.append)
        assert (found is None) == (best is None), problem.name
        if found is None or best is None:
            continue
        result = evaluate(problem, found)
        assert result.feasible, problem.name
        assert result.cost == pytest.approx(found.objective, rel=EXACT), problem.name
        assert found.objective == pytest.approx(best.objective, rel=EXACT), problem.name
        assert found.bound <= best.objective * (1 + EXACT), problem.name
        assert found.bound == pytest.approx(best.objective, rel=1e-6), problem.name
    # The comparison reached every stage of the solver, and both verdicts.
    assert sum("below" in step for step in steps) > 20
    assert 20 < sum(best is None for best in optima) < 150


def test_cores_pruned_by_a_bound_keep_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_search, "NEAR", math.inf)
    monkeypatch.setattr(_search, "MANY_PAIRS", 0)
    pruned = 0
    for problem in map(tight, range(30)):
        best = attempt(problem, "brute_force")
        if best is None:
            continue
        search = _search.Search(problem, 60.0, 1e-9, None)
        _search.relax(search)
        pruned += len(search.layers) > 1
        assert search.bound <= best.objective * (1 + EXACT)
        found = solve(problem, "auto", gap=1e-9)
        assert evaluate(problem, found).feasible
        assert found.objective == pytest.approx(best.objective, rel=EXACT)
        assert found.bound == pytest.approx(best.objective, rel=EXACT)
    assert pruned > 5


def test_greedy_is_valid_and_never_below_the_optimum(optima: list[Solution | None]) -> None:
    failures = 0
    for problem, best in zip(PROBLEMS, optima, strict=True):
        found = attempt(problem, "greedy")
        if best is None:
            assert found is None, problem.name
        elif found is None:
            failures += 1
        else:
            result = evaluate(problem, found)
            assert result.feasible, problem.name
            assert result.cost == pytest.approx(found.objective, rel=EXACT), problem.name
            assert found.objective >= best.objective * (1 - EXACT), problem.name
            assert found.bound <= best.objective * (1 + EXACT), problem.name
    assert failures < 10


def test_reduction_keeps_the_optimum_and_every_price(optima: list[Solution | None]) -> None:
    rng = np.random.default_rng(0)
    for problem, best in zip(PROBLEMS, optima, strict=True):
        try:
            reduction = reduce(problem)
        except InfeasibleError:
            assert best is None, problem.name
            continue
        small = reduction.problem
        found = attempt(small, "brute_force")
        assert (found is None) == (best is None), problem.name
        if found is not None and best is not None:
            assert found.objective == pytest.approx(best.objective, rel=EXACT), problem.name
        for _ in range(5):
            choice = [int(rng.integers(len(node.cost))) for node in small.nodes]
            before, after = evaluate(problem, reduction.expand(choice)), evaluate(small, choice)
            if after.cost == np.inf:  # also where nodes that stand for one node disagree
                continue
            assert before.cost == pytest.approx(after.cost, rel=EXACT), problem.name
            assert before.feasible == after.feasible, problem.name


def test_reductions_solve_series_parallel_problems_whole() -> None:
    rng = np.random.default_rng(1)
    nodes = [
        Choices(f"v{i}", ("a",) * 5, tuple(rng.random(5)), tuple(rng.random(5)), (0, 1))
        for i in range(60)
    ]
    links = [(i, i + 1) for i in range(59)] + [(i, i + 4) for i in range(0, 55, 4)]
    edges = tuple(Edge(a, b, rng.random((5, 5))) for a, b in links)
    problem = Problem("residual", tuple(nodes), edges, None)
    reduction = reduce(problem)
    assert [len(node.cost) for node in reduction.problem.nodes] == [1]
    best = evaluate(reduction.problem, (0,)).cost
    assert evaluate(problem, reduction.expand((0,))).cost == pytest.approx(best, rel=EXACT)
    # No single or double change improves on it, which a wrong elimination would hardly survive.
    choice = reduction.expand((0,))
    for a, b in links:
        for i, j in product(range(5), range(5)):
            other = [*choice]
            other[a], other[b] = i, j
            assert evaluate(problem, other).cost >= best * (1 - EXACT)


def test_large_costs_do_not_hide_small_ones() -> None:
    """A matrix that is separable but for microseconds, beside 1e12 seconds, is not folded."""
    matrix = np.array([[0.0, 1e-5], [1e-5, 0.0], [1e12, 1e12]])
    first = Choices("v", ("a", "b", "c"), (5e-6, 0.0, 0.0), (0.0,) * 3, (0, 1))
    second = Choices("w", ("a", "b"), (5e-6, 0.0), (0.0,) * 2, (0, 1))
    assert solve(Problem("scales", (first, second), (Edge(0, 1, matrix),), None)).choice == (1, 1)


def test_critical_times_hold_every_clique() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        lives = [(int(a), int(a + d)) for a, d in rng.integers(0, 12, (6, 2))]
        nodes = tuple(Choices("v", ("a",), (0.0,), (1.0,), live) for live in lives)
        times = critical_times(Problem("intervals", nodes, (), None)).tolist()

        def at(time: int, lives: list[tuple[int, int]] = lives) -> frozenset[int]:
            return frozenset(v for v, (start, end) in enumerate(lives) if start <= time < end)

        cliques = {at(time) for time in range(25)} - {frozenset()}
        maximal = {c for c in cliques if not any(c < other for other in cliques)}
        assert {at(time) for time in times} == maximal


def test_a_limit_less_by_one_byte_than_a_tolerance_is_still_a_limit() -> None:
    """80 GB and a byte too many: far below what an integer program's tolerance can tell."""
    half = 40e9
    node = Choices("v", ("fast", "slow"), (1.0, 2.0), (half + 1, half / 2), (0, 1))
    light = replace(node, memory=(half, half / 2))
    edge = Edge(0, 1, np.array([[0.0, 0.3], [0.1, 0.0]]))
    problem = Problem("bytes", (node, light, light), (edge, Edge(1, 2, edge.cost)), 3 * half)
    best = solve(problem, "brute_force")
    assert solve(problem).choice == best.choice != (0, 0, 0)
    assert solve(replace(problem, memory_limit=3 * half + 1)).choice == (0, 0, 0)


def test_the_least_attainable_peak_is_in_the_message() -> None:
    """Each node could hold 1 byte, but not both: the least peak is 1 + 5."""
    node = Choices("v", ("big", "small"), (1.0, 1.0), (5.0, 1.0), (0, 1))
    edge = Edge(0, 1, np.array([[0.0, 0.0], [0.0, FORBIDDEN]]))
    problem = Problem("peak", (node, node), (edge,), 5.5)
    for solver in ("ilp", "brute_force"):
        with pytest.raises(InfeasibleError) as caught:
            solve(problem, solver)
        assert "least attainable peak: 6 bytes" in str(caught.value)
    assert solve(replace(problem, memory_limit=6.0)).objective == 2.0


def test_cbc_takes_over_without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_program.importlib.util, "find_spec", lambda name: None)
    try:
        cbc._cbc(Budget(1.0), 0.0, 1)
    except MissingDependencyError:
        pytest.skip("PuLP comes without CBC here")
    steps: list[str] = []
    for problem in map(tight, range(100, 108)):
        best, found = (
            attempt(problem, "brute_force"),
            attempt(problem, "ilp", gap=0.0, progress=steps.append),
        )
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.objective == pytest.approx(best.objective, rel=EXACT)
            assert found.bound <= best.objective * (1 + EXACT)
    assert any("below" in step for step in steps)


def test_out_of_time_gives_a_valid_choice_and_bound(optima: list[Solution | None]) -> None:
    for problem, best in list(zip(PROBLEMS, optima, strict=True))[140:170]:
        found = attempt(problem, "ilp", time_limit=0.0)
        if found is not None and best is not None:
            assert evaluate(problem, found).feasible
            assert found.bound <= best.objective * (1 + EXACT) <= found.objective * (1 + 2 * EXACT)


def test_discovery_and_unknown_solvers() -> None:
    assert {"brute_force", "greedy", "ilp"} <= set(solvers())
    with pytest.raises(ProblemError, match="'simplex'") as caught:
        solve(loose(0), "simplex")
    assert "brute_force, elimination, greedy, ilp" in str(caught.value)


def test_brute_force_refuses_what_is_too_large() -> None:
    node = Choices("v", ("a",) * 10, (0.0,) * 10, (0.0,) * 10, (0, 1))
    with pytest.raises(ProblemError, match="too large"):
        solve(Problem("large", (node,) * 7, (), None), "brute_force")


@pytest.mark.parametrize("solver", ["brute_force", "greedy", "ilp"])
def test_a_problem_without_nodes(solver: str) -> None:
    found = solve(Problem("empty", (), (), 0.0), solver)
    assert (found.choice, found.objective) == ((), 0.0)

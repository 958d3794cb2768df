"""Fitting plans into memory, with given peaks; options that solvers receive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Choices, Edge, Problem, evaluate
from autopar.intra_op.solvers import solve
from autopar.ir.mesh import Mesh
from autopar.plan_entries import Prediction
from autopar.planning.within_memory import LATER, Fitted, _work, fitting, solve_by_work
from autopar.stage_plan import StagePlan

LEAST = 30.0  # bytes that every choice holds at least
PROBLEM = Problem("two", (Choices("a", ("x", "y"), (1.0, 2.0), (90.0, LEAST), (0, 1)),), (), None)


class Maker:
    """Plans whose simulated peak is some bytes above what the problem counts."""

    def __init__(self, above: Callable[[float], float], least: float = LEAST) -> None:
        self.above, self.least = above, least
        self.asked: list[tuple[float, float | None]] = []

    def __call__(self, allowed: float, before: Fitted | None) -> Fitted:
        self.asked.append((allowed, before and before.counted))
        if allowed < self.least:
            raise InfeasibleError("no choice fits in memory")
        counted = min(allowed, 90.0)
        figures = Prediction(peak_bytes=counted + self.above(counted))
        return Fitted(
            StagePlan("g", Mesh.parse("cpu: gpu=2"), {}, predicted=figures), counted, (0,)
        )


def test_the_first_plan_that_fits_is_taken() -> None:
    maker = Maker(lambda counted: 5.0)
    assert fitting(maker, PROBLEM, 100.0, True).predicted.peak_bytes == 95
    assert maker.asked == [(100.0, None)]


def test_a_plan_that_does_not_fit_is_the_start_of_one_with_as_much_less() -> None:
    maker = Maker(lambda counted: 20.0)
    assert fitting(maker, PROBLEM, 80.0, True).predicted.peak_bytes == 80
    assert maker.asked == [(80.0, None), (60.0, 80.0)]


def test_the_smallest_plan_is_the_last_to_be_tried() -> None:
    # What is not counted shrinks in jumps: tightening by it overshoots.
    maker = Maker(lambda counted: 0.0 if counted < 32 else 60.0)
    made = fitting(maker, PROBLEM, 80.0, True)
    assert made.predicted.peak_bytes == pytest.approx(1.02 * LEAST)
    halfway = (80.0 + LEAST) / 2
    assert maker.asked[:2] == [(80.0, None), (halfway, 80.0)]
    assert maker.asked[-1] == (pytest.approx(1.02 * LEAST), halfway)


def test_a_refusal_names_the_smallest_that_was_found() -> None:
    with pytest.raises(InfeasibleError, match="no plan was found") as refused:
        fitting(Maker(lambda counted: 60.0), PROBLEM, 80.0, True)
    assert "the smallest needs 90.6 bytes" in refused.value.why or "90.6 B" in refused.value.why
    with pytest.raises(InfeasibleError, match="no plan fits"):
        fitting(Maker(lambda counted: 60.0), PROBLEM, LEAST - 1, True)
    with pytest.raises(InfeasibleError, match="no choice fits"):
        fitting(Maker(lambda counted: 0.0, least=50.0), PROBLEM, 40.0, False)


def test_large_problems_have_more_work() -> None:
    def of(size: int) -> Problem:
        node = Choices("n", tuple(map(str, range(size))), (0.0,) * size, (1.0,) * size, (0, 1))
        return Problem("p", (node, node), (Edge(0, 1, np.zeros((size, size))),), 1e9)

    small, large = (_work(of(size)) for size in (10, 3000))
    assert 0 < LATER * small < small < large == 20


def test_a_choice_to_begin_with_changes_no_optimum() -> None:
    rng = np.random.default_rng(0)
    sizes = [4] * 6
    nodes = tuple(
        Choices(f"n{i}", tuple("abcd"), tuple(rng.random(4)), tuple(rng.random(4)), (0, 1))
        for i in range(len(sizes))
    )
    edges = tuple(Edge(i, i + 1, rng.random((4, 4))) for i in range(len(sizes) - 1))
    problem = Problem("chain", nodes, edges, 2.5)
    best = solve(problem, "brute_force").objective
    for solver in ("ilp", "auto"):
        for start in ((0,) * 6, (3,) * 6):
            found = solve(problem, solver, start=start)
            assert found.objective == pytest.approx(best)
            assert evaluate(problem, found).feasible
    for solver in ("ilp", "auto", "local_search", "pulp", "greedy", "brute_force"):
        with_options = solve_by_work(problem, solver, 1.0, start=(0,) * 6, gap=0.0)
        assert evaluate(problem, with_options).feasible
        assert with_options.objective >= best * (1 - 1e-9)

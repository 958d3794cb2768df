"""Choices that bounds exclude below a target, round after round, against enumeration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Choices, Edge, Problem, evaluate, frugal
from autopar.intra_op.reduce import Flat, flatten
from autopar.intra_op.reduce.flat import Floats, Ints
from autopar.intra_op.solvers import solve
from autopar.intra_op.solvers._dual import Dual, ascend
from autopar.intra_op.solvers._integer import closing
from autopar.intra_op.solvers._integer.integer_program import solve_program
from autopar.intra_op.solvers._integer.narrowing import narrow
from autopar.intra_op.solvers._search import Search


def drawn(seed: int, count: int = 6) -> Problem:
    """Nodes that are all joined to one another, and memory that is scarce at two times."""
    rng = np.random.default_rng(seed)
    nodes = []
    for v in range(count):
        cost, memory = rng.random(5), 1 - rng.random(5)
        live = ((0, 1), (1, 2), (0, 2))[rng.integers(3)]
        nodes.append(Choices(f"v{v}", tuple("abcde"), tuple(cost), tuple(memory), live))
    edges = tuple(Edge(a, b, 0.4 * rng.random((5, 5))) for a, b in combinations(range(count), 2))
    return Problem("dense", tuple(nodes), edges, 1.6 * sum(frugal(nodes)[1].values()))


PROBLEMS = [drawn(seed) for seed in range(25)]


def prices(flat: Flat) -> tuple[Ints, Floats]:
    """All choices, and their prices; infinite for those that do not fit."""
    every = np.array(list(product(*map(range, np.diff(flat.start)))), dtype=np.int64)
    found = flat.total + flat.cost[flat.start[:-1] + every].sum(axis=1)
    for e, (a, b) in enumerate(flat.ends):
        columns = flat.start[b + 1] - flat.start[b]
        found += flat.matrix[flat.place[e] + every[:, a] * columns + every[:, b]]
    held = flat.base + flat.table()[flat.start[:-1] + every].sum(axis=1)
    return every, np.where((held <= flat.limit).all(axis=1), found, np.inf)


def bounded(problem: Problem, share: float) -> tuple[Dual, float, float]:
    """A bound that a few steps reach, the optimum, and a target that is a share of that."""
    whole = flatten(problem)
    best = float(prices(whole)[1].min())
    prices_of_memory = np.zeros(len(whole.base))
    return ascend(whole, prices_of_memory, share * best, lambda *_: False, 10), best, share * best


def unknown(guesses: Sequence[Ints]) -> float:
    return math.inf


@pytest.mark.parametrize("share", [1.0, 1.05])
def test_the_optimum_stays_and_the_bound_is_below_it(share: float) -> None:
    further = 0
    for problem in PROBLEMS:
        dual, best, target = bounded(problem, share)
        found = narrow(dual, target, "", unknown, lambda work: False)
        further += len(found.flat.cost) < len(found.layers[0].flat.cost)
        assert found.dual.bound <= best * (1 + 1e-12)
        every, price = prices(found.flat)
        choice = found.expand(every[price.argmin()])
        result = evaluate(problem, choice.tolist())
        assert result.feasible
        assert result.cost == pytest.approx(best, rel=1e-12)
    assert further > 5  # problems of which rounds after the first one leave out more


def test_below_the_optimum_there_is_nothing() -> None:
    refuted = 0
    for problem in PROBLEMS:
        dual, _, target = bounded(problem, 0.98)
        try:
            found = narrow(dual, target, "", unknown, lambda work: False)
        except InfeasibleError:
            refuted += 1
            continue
        assert prices(found.flat)[1].min() > target
    assert refuted > 5


def test_a_better_price_met_on_the_way_is_the_target() -> None:
    dual, best, target = bounded(PROBLEMS[3], 1.3)
    found = narrow(dual, target, "", lambda guesses: 1.1 * best, lambda work: False)
    assert found.target == 1.1 * best
    assert prices(found.flat)[1].min() == pytest.approx(best, rel=1e-12)


def test_no_further_round_out_of_time() -> None:
    dual, _, target = bounded(PROBLEMS[0], 1.3)
    assert len(narrow(dual, target, "", unknown, lambda work: True).layers) == 1


def test_a_much_better_price_begins_the_program_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is given up for a smaller one when its optimum is met long before its end."""
    given_up = []

    def early(stated: Any, budget: Any, gap: float, report: Any, *rest: Any) -> Any:
        last: list[Ints] = []

        def keep(bound: float, choice: Ints | None) -> bool:
            last[:] = last if choice is None else [choice]
            return True

        status, bound = solve_program(stated, budget, gap, keep, *rest)
        if last and not report(-math.inf, last[-1]):
            given_up.append(stated)
            return "stopped", -math.inf
        return status, bound

    monkeypatch.setattr(closing, "solve_program", early)
    monkeypatch.setattr(closing, "HALF", 0.999)
    monkeypatch.setattr(Search, "_improve", lambda search, choice: None)  # begin with a poor price
    for problem in PROBLEMS[:12]:
        best = float(prices(flatten(problem))[1].min())
        assert solve(problem, "ilp").objective == pytest.approx(best, rel=1e-6)
    assert given_up

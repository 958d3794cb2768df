"""Limits of a search: counted work ends it at the same choice, whatever the clock says."""

from __future__ import annotations

import math
import time

import pytest

from autopar.intra_op.problem import Solution, evaluate
from autopar.intra_op.solvers import solve
from autopar.intra_op.solvers._budget import Budget
from autopar.intra_op.solvers._integer import integer_program
from autopar.intra_op.solvers._large import search_large
from tests.intra_op.test_trees import crowded


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an hour pass between two looks at the clock."""
    hours = iter(range(10**9))
    monkeypatch.setattr("time.perf_counter", lambda: 3600.0 * next(hours))
    monkeypatch.setattr("time.monotonic", time.perf_counter)


def solved(solver: str, work: float) -> Solution:
    return solve(crowded(4, 60, 62), solver, time_limit=math.inf, work=work, gap=0.0)


@pytest.mark.parametrize("kind", ["inside", "apart", "large", "local_search", "mcmc"])
def test_work_ends_a_search_at_the_same_choice_on_any_clock(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integer programs in this process and in another, the search of large problems, and others."""
    if kind == "large":
        monkeypatch.setattr(search_large, "LARGE", 0)
    if kind == "apart":
        monkeypatch.setattr(integer_program, "MOST_INSIDE", 0)
    solver = kind if kind in ("local_search", "mcmc") else "ilp"
    work = 0.02 if solver == "mcmc" else 0.15
    usual = solved(solver, work)
    hurried(monkeypatch)
    again = solved(solver, work)
    assert usual.ended == again.ended == "work"
    assert usual.choice == again.choice
    assert usual.bound == again.bound
    assert evaluate(crowded(4, 60, 62), again).feasible


def test_a_part_ends_by_its_share_of_time_or_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    budget = Budget(100.0, 10.0)
    assert (budget.left(), budget.unspent()) == (95.0, 10.0)  # 5 s are in reserve
    budget.spend(2.0)
    part = budget.part(0.5)
    assert not part.spent(4.0)
    assert part.spent(0.1)
    now = 40.0
    late = budget.part(0.5)
    now = 60.0
    assert not late.spent()
    now = 68.0
    assert late.spent()
    assert not budget.over
    now = 95.0
    assert budget.over
    assert str(budget) == "work of 10 s"
    assert Budget(math.inf).left() == math.inf


def test_a_share_ends_earlier_than_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.intra_op.solvers._budget.time.perf_counter", lambda: 0.0)
    budget = Budget(100.0, 10.0)
    budget.spend(4.0)
    with budget.within(0.5):
        assert (budget.left(), budget.unspent()) == (47.5, 3.0)
        budget.spend(5.0)  # more than there is
        assert budget.over
    assert (budget.left(), budget.unspent()) == (95.0, 3.0)


def test_a_share_of_no_limit_is_no_limit() -> None:
    budget = Budget(math.inf)
    with budget.within(0.5):
        assert (budget.left(), budget.unspent()) == (math.inf, math.inf)

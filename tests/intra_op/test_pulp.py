"""Compares PuLP's named program with the one in arrays: equal optima, or both find none."""

from __future__ import annotations

import pytest

from autopar.errors import MissingDependencyError, ProblemError
from autopar.intra_op.problem import Choices, Edge, Problem, evaluate
from autopar.intra_op.solvers import solve
from autopar.intra_op.solvers.pulp import PulpProgram, written
from tests.intra_op.test_solvers import attempt, loose, tight


def test_both_programs_have_the_same_optimum() -> None:
    solved = 0
    for seed in range(12):
        for problem in (loose(seed), tight(seed)):
            stated, arrays = attempt(problem, "pulp:HiGHS"), attempt(problem, "ilp", gap=1e-9)
            assert (stated is None) == (arrays is None), problem.name
            if stated is not None and arrays is not None:
                assert evaluate(problem, stated).feasible
                assert stated.objective == pytest.approx(arrays.objective, rel=1e-7)
                solved += 1
    assert 5 < solved < 24


def test_names_and_constraints_are_those_of_the_docstring() -> None:
    nodes = (
        Choices("up proj", ("a", "b"), (1.0, 2.0), (4.0, 1.0), (0, 2)),
        Choices("relu:0", ("a", "b"), (5.0, 1e18), (2.0, 2.0), (1, 3)),
    )
    problem = Problem("p", nodes, (Edge(0, 1, [[3.0, 1.0], [0.0, 1.0]]),), 5.0)
    lp = PulpProgram(problem).lp
    assert {constraint.name for constraint in lp.constraints()} == {
        "one_choice_up_proj", "one_choice_relu_0", "follows_up_proj_relu_0_0_0",
        "follows_up_proj_relu_0_0_1", "leads_up_proj_relu_0_0_0", "memory_1",
    }  # fmt: skip
    assert "choose_relu_0_1" not in written(problem)  # it is forbidden
    assert solve(problem, "pulp").choice == (1, 0)


def test_backends_are_named() -> None:
    problem = Problem("p", (Choices("v", ("a",), (1.0,), (0.0,), (0, 0)),), (), None)
    with pytest.raises(ProblemError, match="'simplex'"):
        solve(problem, "pulp:simplex")
    with pytest.raises(ProblemError, match="'ilp:HiGHS'"):
        solve(problem, "ilp:HiGHS")
    with pytest.raises(MissingDependencyError, match="GUROBI"):
        solve(problem, "pulp:GUROBI")

"""Solvers of strategy problems; every module of this folder with a function `solve` is one."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any, Protocol, cast

from autopar.errors import ProblemError
from autopar.intra_op.problem import Problem, Solution


class Solver(Protocol):
    """Returns a choice that fits for a problem, or raises `InfeasibleError`."""

    def __call__(self, problem: Problem, /, **options: Any) -> Solution:
        """Returns one choice for every node, its objective and a proven bound."""


def solvers() -> dict[str, Solver]:
    """Returns all solvers by module name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = {name: import_module(f"{__name__}.{name}") for name in names if name[0] != "_"}
    return {
        name: cast(Solver, module.solve)
        for name, module in modules.items()
        if hasattr(module, "solve")
    }


def find(name: str) -> Solver:
    """Returns the solver of that name; otherwise raises a ProblemError that lists the solvers."""
    known = solvers()
    if name not in known:
        raise ProblemError(
            f"there is no solver {name!r}",
            why="the solvers are " + ", ".join(known),
            todo="name one of these",
        )
    return known[name]


def solve(problem: Problem, solver: str = "ilp", **options: Any) -> Solution:
    """Returns the solution of the named solver, which gets `options`.

    Raises:
        ProblemError: there is no such solver.
        InfeasibleError: no choice fits, or the solver finds none.
    """
    return find(solver)(problem, **options)

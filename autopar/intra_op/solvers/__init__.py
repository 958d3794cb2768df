"""Solvers of strategy problems; every module of this folder with a function `solve` is one."""

from __future__ import annotations

import pkgutil
from functools import partial
from importlib import import_module
from typing import Any, Protocol, cast

from autopar.errors import ProblemError
from autopar.intra_op.problem import Problem, Solution

BACKENDS = ("pulp",)
"""Solvers that take a backend after a colon."""


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
    """Returns the solver of that name; "pulp:HiGHS" names a solver and its backend.

    Raises:
        ProblemError: there is no such solver; the message lists them.
    """
    known = solvers()
    base, _, backend = name.partition(":")
    if base not in known or (backend and base not in BACKENDS):
        raise ProblemError(
            f"there is no solver {name!r}",
            why="the solvers are " + ", ".join(known),
            todo="name one of these",
        )
    return cast(Solver, partial(known[base], backend=backend)) if backend else known[base]


def solve(problem: Problem, solver: str = "ilp", **options: Any) -> Solution:
    """Returns the solution of the named solver, which gets `options`.

    Raises:
        ProblemError: there is no such solver.
        InfeasibleError: no choice fits, or the solver finds none.
    """
    return find(solver)(problem, **options)

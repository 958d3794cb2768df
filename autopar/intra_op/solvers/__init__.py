"""Solvers of strategy problems.

Every module of this folder is one, by its function `solve`, unless its name begins with "_".
Solvers are imported when they are used, because most of them import numba.
"""

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


def names() -> tuple[str, ...]:
    """Returns the names of all solvers, in alphabetical order, without importing them."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in modules if name[0] != "_"))


def solvers() -> dict[str, Solver]:
    """Returns all solvers by name, in alphabetical order."""
    return {name: _solver(name) for name in names()}


def check(name: str) -> None:
    """Raises ProblemError, which lists the solvers, if there is none of that name."""
    base, _, backend = name.partition(":")
    if base not in names() or (backend and base not in BACKENDS):
        raise ProblemError(
            f"there is no solver {name!r}",
            why="the solvers are " + ", ".join(names()),
            todo="name one of these",
        )


def find(name: str) -> Solver:
    """Returns the solver of that name; "pulp:HiGHS" names a solver and its backend.

    Raises:
        ProblemError: there is no such solver; the message lists them.
    """
    check(name)
    base, _, backend = name.partition(":")
    solver = _solver(base)
    return cast(Solver, partial(solver, backend=backend)) if backend else solver


def _solver(name: str) -> Solver:
    return cast(Solver, import_module(f"{__name__}.{name}").solve)


def solve(problem: Problem, solver: str = "ilp", **options: Any) -> Solution:
    """Returns the solution of the named solver, which gets `options`.

    Raises:
        ProblemError: there is no such solver.
        InfeasibleError: no choice fits, or the solver finds none.
    """
    return find(solver)(problem, **options)

"""Methods of device placement; every module of this folder with a function `place` is one."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any, Protocol, cast

from autopar.errors import ProblemError
from autopar.inter_op.placement.placement_problem import Placed, PlacementProblem


class Method(Protocol):
    """Returns a placement that fits, or raises `InfeasibleError`."""

    def __call__(self, problem: PlacementProblem, /, **options: Any) -> Placed:
        """Returns the devices of all tasks; options are `time_limit` and `seed`."""


def methods() -> dict[str, Method]:
    """Returns all methods by module name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {
        name: cast(Method, import_module(f"{__name__}.{name}").place)
        for name in names
        if name[0] != "_"
    }


def place(problem: PlacementProblem, method: str = "list_scheduling", **options: Any) -> Placed:
    """Returns the placement of the named method.

    Raises:
        ProblemError: there is no such method.
        InfeasibleError: the method finds no placement that fits.
    """
    known = methods()
    if method not in known:
        raise ProblemError(
            f"there is no method {method!r}",
            why="the methods are " + ", ".join(known),
            todo="name one of these",
        )
    return known[method](problem, **options)

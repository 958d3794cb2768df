"""Pipeline schedules: every module of this folder with a function `schedule` is one.

A module holds

- `NAME`: what the schedule is called;
- `NEEDS`: which sizes it takes, in words;
- `schedule(ranks, microbatches, **options)`: a pure function that returns a `Schedule`, or raises
  ScheduleError where the sizes do not fit.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Schedule


class Build(Protocol):
    """Makes a schedule; raises ScheduleError where the sizes do not fit."""

    def __call__(self, ranks: int, microbatches: int, /, **options: Any) -> Schedule:
        """Returns the schedule for so many ranks and microbatches."""


@dataclass(frozen=True)
class Recipe:
    """One schedule that there is.

    Attributes:
        name: what it is called.
        summary: what it does, a sentence.
        needs: which sizes it takes.
        build: makes it.
    """

    name: str
    summary: str
    needs: str
    build: Build


def schedules() -> dict[str, Recipe]:
    """Returns all schedules by name, in alphabetical order.

    Raises:
        ScheduleError: two modules have the same name for theirs.
    """
    found: dict[str, Recipe] = {}
    for info in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        if not hasattr(module, "schedule"):
            continue
        if module.NAME in found:
            raise ScheduleError(
                f"there are two schedules {module.NAME!r}",
                where=f"{__name__}.{info.name}",
                todo="give one of them another NAME",
            )
        summary = (module.__doc__ or "").partition("\n")[0]
        found[module.NAME] = Recipe(module.NAME, summary, module.NEEDS, module.schedule)
    return dict(sorted(found.items()))


def schedule(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Returns the named schedule; `options` are its own, as `chunks=2` for "interleaved_1f1b".

    Raises:
        ScheduleError: there is no such schedule, or it does not exist for those sizes.
    """
    found = schedules()
    if name not in found:
        raise ScheduleError(
            f"there is no schedule {name!r}",
            why="the schedules are " + ", ".join(found),
            todo="name one of these",
        )
    return found[name].build(ranks, microbatches, **options)

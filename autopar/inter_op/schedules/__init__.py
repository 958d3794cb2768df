"""Pipeline schedules: every module of this folder with a function `schedule` is one.

A module holds

- `NAME`: what the schedule is called;
- `NEEDS`: which sizes it takes, in words;
- `schedule(ranks, microbatches, **options)`: a pure function that returns a `Schedule`, or raises
  ScheduleError where the sizes do not fit;
- `CANDIDATES`, if a search for a pipeline is to consider it: the texts of its options, `("",)` for
  none;
- `ALLOW`, if it changes what is computed: what a user has to allow, `"stale gradients"`.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Schedule

_OPTIONAL = ("CANDIDATES", "ALLOW")


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
        candidates: texts of the options with which a search considers it.
        allow: what has to be allowed, "" if it computes what one device does.
    """

    name: str
    summary: str
    needs: str
    build: Build
    candidates: tuple[str, ...] = ()
    allow: str = ""


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
        own = {key.lower(): getattr(module, key) for key in _OPTIONAL if hasattr(module, key)}
        found[module.NAME] = Recipe(module.NAME, summary, module.NEEDS, module.schedule, **own)
    return dict(sorted(found.items()))


def exact() -> tuple[str, ...]:
    """Returns the names of the schedules that compute what one device does."""
    return tuple(recipe.name for recipe in schedules().values() if not recipe.allow)


def candidates(allow: str = "") -> tuple[str, ...]:
    """Returns the schedules that a search considers, "1f1b" or "interleaved_1f1b chunks=2".

    Those without options come first, others in the order of their files.

    Args:
        allow: what is allowed, see `allowed`.
    """
    known = allowed(allow)
    texts = [
        f"{recipe.name} {options}".strip()
        for recipe in schedules().values()
        if recipe.allow in ("", *known)
        for options in recipe.candidates
    ]
    return tuple(sorted(texts, key=lambda text: " " in text))


def allowed(text: str) -> frozenset[str]:
    """Returns what a text such as "stale gradients" allows.

    Raises:
        ScheduleError: no schedule asks for it.
    """
    asked = frozenset(part for part in (part.strip() for part in text.split(",")) if part)
    known = {recipe.allow for recipe in schedules().values() if recipe.allow}
    for one in sorted(asked - known):
        raise ScheduleError(
            f"there is nothing {one!r} to allow",
            why="schedules ask for " + (", ".join(map(repr, sorted(known))) or "nothing"),
            todo="allow one of these, or leave it out",
        )
    return asked


def check_allowed(text: str, allow: str) -> None:
    """Returns where a schedule may be used.

    Args:
        text: its name, with options.
        allow: what is allowed.

    Raises:
        ScheduleError: it changes what is computed, and that is not allowed.
    """
    known, recipe = allowed(allow), schedules().get(text.partition(" ")[0])
    if recipe is not None and recipe.allow not in ("", *known):
        raise ScheduleError(
            f"the schedule {recipe.name!r} trains with {recipe.allow}",
            why="it does not compute what one device would, and may need other learning rates",
            todo=f"pass allow={recipe.allow!r} if that is meant",
        )


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

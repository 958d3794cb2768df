"""Registry of pipeline schedules: every module of this folder with a function `schedule`.

A module defines

- `NAME`: the name of the schedule;
- `NEEDS`: the supported sizes, in words;
- `schedule(ranks, microbatches, **options)`: a pure function that returns a `Schedule`, or raises
  ScheduleError for unsupported sizes;
- `CANDIDATES`, if a stage search should consider it: option texts to try, `("",)` for no options;
- `ALLOW`, if it changes the computed result: the permission it requires, `"stale gradients"`.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Schedule

_OPTIONAL = ("CANDIDATES", "ALLOW")
LOCAL_UPDATES = "local updates"  # a permission for plans, not for schedules


class Build(Protocol):
    """Builds a schedule; raises ScheduleError for unsupported sizes."""

    def __call__(self, ranks: int, microbatches: int, /, **options: Any) -> Schedule:
        """Returns the schedule for the given numbers of ranks and microbatches."""


@dataclass(frozen=True)
class Recipe:
    """One registered schedule.

    Attributes:
        name: name of the schedule.
        summary: a one-sentence description.
        needs: the supported sizes.
        build: builds the schedule.
        candidates: option texts that a stage search considers.
        allow: the required permission, "" if the result equals that of a single device.
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
        ScheduleError: two modules define the same name.
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
    """Returns the names of the schedules whose result equals that of a single device."""
    return tuple(recipe.name for recipe in schedules().values() if not recipe.allow)


def candidates(allow: str = "") -> tuple[str, ...]:
    """Returns the schedules that a search considers, "1f1b" or "interleaved_1f1b chunks=2".

    Schedules without options come first, the others in the order of their files.

    Args:
        allow: permissions, see `allowed`.
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
    """Parses a text of permissions such as "stale gradients".

    Raises:
        ScheduleError: a permission is unknown.
    """
    asked = frozenset(part for part in (part.strip() for part in text.split(",")) if part)
    known = {recipe.allow for recipe in schedules().values() if recipe.allow} | {LOCAL_UPDATES}
    for one in sorted(asked - known):
        raise ScheduleError(
            f"there is nothing {one!r} to allow",
            why="plans ask for " + ", ".join(map(repr, sorted(known))),
            todo="allow one of these, or leave it out",
        )
    return asked


def computes_as_one(text: str) -> bool:
    """Returns whether a schedule, with its options, computes what one device would."""
    recipe = schedules().get(text.partition(" ")[0])
    return recipe is None or not recipe.allow


def check_allowed(text: str, allow: str) -> None:
    """Checks that a schedule may be used.

    Args:
        text: its name, with options.
        allow: the permissions that were granted.

    Raises:
        ScheduleError: it changes the computed result, which is not permitted.
    """
    known, recipe = allowed(allow), schedules().get(text.partition(" ")[0])
    if recipe is not None and recipe.allow not in ("", *known):
        raise ScheduleError(
            f"the schedule {recipe.name!r} trains with {recipe.allow}",
            why="it does not compute what one device would, and may need other learning rates",
            todo=f"pass allow={recipe.allow!r} if that is meant",
        )


def recipe_of(name: str) -> Recipe:
    """Returns the named schedule's recipe.

    Raises:
        ScheduleError: the schedule does not exist.
    """
    found = schedules()
    if name not in found:
        raise ScheduleError(
            f"there is no schedule {name!r}",
            why="the schedules are " + ", ".join(found),
            todo="name one of these",
        )
    return found[name]


def schedule(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Returns the named schedule; `options` are specific to it, such as `chunks=2`.

    Raises:
        ScheduleError: the schedule does not exist, or does not support those sizes.
    """
    return recipe_of(name).build(ranks, microbatches, **options)

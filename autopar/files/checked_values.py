"""Values from outside, each checked by its kind: entries of files and arguments of functions.

Integer(1, 64)("4")       ValueError: a whole number from 1 to 64 is expected
Fields(table, PlanError, where).take("microbatches", Integer(1, 64))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.errors import AutoparError

LONGEST = 100_000  # characters of one text
MOST = 2**53  # whole numbers that every reader of the files keeps exactly


class Check(Protocol):
    """Returns a value of its kind; raises ValueError for others. `str` describes the kind."""

    def __call__(self, value: Any, /) -> Any:
        """The value."""


@dataclass(frozen=True)
class Integer:
    """A whole number; with `rounded` also a float of such a value."""

    least: int = 0
    most: int = MOST
    rounded: bool = False

    def __call__(self, value: Any, /) -> int:
        """The number."""
        if self.rounded and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            number = operator.index(value)
        except TypeError:
            raise ValueError(f"{self} is expected") from None
        if isinstance(value, bool) or not self.least <= number <= self.most:
            raise ValueError(f"{self} is expected")
        return number

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True)
class Number:
    """A finite number."""

    least: float = 0.0
    most: float = 1e30
    above: bool = False

    def __call__(self, value: Any, /) -> float:
        """The number as a float."""
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise ValueError(f"{self} is expected")
        try:
            number = float(value)
        except (ValueError, TypeError, OverflowError, RuntimeError):
            raise ValueError(f"{self} is expected") from None
        within = self.least <= number <= self.most and not (self.above and number == self.least)
        if not (math.isfinite(number) and within):
            raise ValueError(f"{self} is expected")
        return number

    def __str__(self) -> str:
        return f"a number {'above' if self.above else 'from'} {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Text:
    """A text that a file can hold, without null characters; perhaps one of a few."""

    longest: int = LONGEST
    known: tuple[str, ...] = ()

    def __call__(self, value: Any, /) -> str:
        """The text."""
        good = isinstance(value, str) and len(value) <= self.longest and "\0" not in value
        good = good and not any("\ud800" <= sign <= "\udfff" for sign in value)
        if not good or (self.known and value not in self.known):
            raise ValueError(f"{self} is expected")
        return str(value)

    def __str__(self) -> str:
        if self.known:
            return f"one of {', '.join(map(repr, self.known))}"
        return f"a text of up to {self.longest} characters"


@dataclass(frozen=True)
class Instance:
    """A value of one of some types, which may include that of `None`."""

    types: tuple[type, ...]
    words: str

    def __call__(self, value: Any, /) -> Any:
        """The value."""
        if not isinstance(value, self.types):
            raise ValueError(f"{self} is expected")
        return value

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class AnyOf:
    """A value that at least one of some checks accepts."""

    checks: tuple[Check, ...]

    def __call__(self, value: Any, /) -> Any:
        """Returns the value as the first check that accepts it reads it."""
        for check in self.checks:
            try:
                return check(value)
            except ValueError:
                continue
        raise ValueError(f"{self} is expected")

    def __str__(self) -> str:
        return " or ".join(map(str, self.checks))


@dataclass(frozen=True)
class Table:
    """Values of one kind by name."""

    value: Check

    def __call__(self, table: Any, /) -> dict[str, Any]:
        """Returns the table with its checked values."""
        if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
            raise ValueError("a table is expected")
        found = {}
        for key, value in table.items():
            try:
                found[key] = self.value(value)
            except ValueError as error:
                raise ValueError(f"{shown(key)} = {shown(value)}: {error}") from error
        return found

    def __str__(self) -> str:
        return f"a table of values, each {self.value}"


@dataclass(frozen=True)
class Row:
    """A list of values of one kind, without repetitions if they are `unique`."""

    value: Check
    unique: bool = False

    def __call__(self, row: Any, /) -> tuple[Any, ...]:
        """The values."""
        if not isinstance(row, list | tuple):
            raise ValueError(f"{self} is expected")
        values = tuple(map(self.value, row))
        if self.unique and len(set(values)) < len(values):
            raise ValueError("each may stand there once")
        return values

    def __str__(self) -> str:
        return f"a list of values, each {self.value}"


NOTHING = Instance((type(None),), "nothing")
FLAG = Instance((bool,), "True or False")


class Fields:
    """The entries of a table, each taken once.

    Args:
        table: an external table.
        error: the class of errors for entries that are missing, unknown or of another kind.
        what: the object that the table describes, such as "the plan".
        where: file and place.
        prefix: before the names of entries, "model." of a table in a table.
    """

    def __init__(
        self,
        table: Any,
        error: type[AutoparError],
        what: str = "the table",
        where: str = "",
        prefix: str = "",
    ) -> None:
        self._error, self._what, self._where, self._prefix = error, what, where, prefix
        if not isinstance(table, Mapping):
            raise error(f"{what} is no table", where=where, why=f"it is {shown(table)}")
        self._table: Mapping[str, Any] = table
        self._known: list[str] = []

    def take(self, name: str, check: Callable[[Any], Any], default: Any = ...) -> Any:
        """Returns an entry as a check reads it, or the default without one; raises `error`."""
        self._known.append(name)
        label = self._prefix + name
        if name not in self._table:
            if default is not ...:
                return default
            raise self._error(
                f"{self._what} has no usable entry {label!r}",
                where=self._where,
                why="it is missing",
                todo="add it as autopar writes it",
            )
        value = self._table[name]
        try:
            return check(value)
        except (AutoparError, ValueError, TypeError, AttributeError, OverflowError) as error:
            why = error.what if isinstance(error, AutoparError) else str(error)
            more = error.why if isinstance(error, AutoparError) else ""
            raise self._error(
                f"{self._what} has a damaged entry {label!r}",
                where=self._where,
                why="; ".join(filter(None, (f"{label} = {shown(value)}", why, more))),
            ) from error

    def end(self) -> None:
        """Refuses entries that were not taken, because nothing would use them."""
        strange = [shown(name) for name in self._table if name not in self._known]
        if strange:
            raise self._error(
                f"{self._what} has unknown entries: {', '.join(strange[:5])}",
                where=self._where,
                why=f"known are {', '.join(self._known)}",
                todo="correct or remove them",
            )


def checked(error: type[AutoparError], **values: tuple[Any, Check]) -> None:
    """Checks arguments; raises `error` with the name of the first wrong one.

    Args:
        error: what is raised.
        values: name of an argument -> the value and its check.
    """
    for name, (value, check) in values.items():
        try:
            check(value)
        except ValueError as reason:
            raise error(f"{name} is {shown(value)}", why=str(reason)) from reason


def shown(value: object) -> str:
    """A value as an error shows it, at most a line."""
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, or an object of the user's
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."

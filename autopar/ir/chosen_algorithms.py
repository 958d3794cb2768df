"""Algorithms of collectives as text, "2d_torus" or "h_ring/4 over 2x8", and calls that use them.

The number after the slash is the number of pieces of each chunk; pieces are pipelined. After `over`
come the sizes of the levels that the algorithm is written for, outermost first; by default those
of the call's axes. A plan and a generated program assign algorithms to calls in rows:

    "all_reduce over node, gpu from 65536: 2d_torus"

covers calls with a payload of 64 KiB or more on each device, up to the next row of the same call.
The library runs calls without a row, and rows that say "library".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import CollectiveError
from autopar.ir.collective import Collective, Step
from autopar.ir.mesh import Mesh

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
LIBRARY = "library"
_ALGORITHM = re.compile(r"(\w{1,64})(?:/(\d{1,4}))?(?: over (\d{1,8}(?:x\d{1,8})*))?")
_ROW = re.compile(r"(\w{1,64}) over ([\w, ]{1,1000}) from (\d{1,18}): (.{1,200})")


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as a call names it.

    Attributes:
        name: name of the algorithm.
        pieces: number of pieces of each chunk.
        shape: the sizes of the levels; () for the sizes of the axes.
    """

    name: str
    pieces: int = 1
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        pieces = f"/{self.pieces}" if self.pieces > 1 else ""
        shape = f" over {'x'.join(map(str, self.shape))}" if self.shape else ""
        return f"{self.name}{pieces}{shape}"

    @classmethod
    def parse(cls, text: str) -> Algorithm:
        """Parses the result of `str`; CollectiveError for anything else."""
        match = _ALGORITHM.fullmatch(text)
        shape = tuple(map(int, match[3].split("x"))) if match and match[3] else ()
        if match is None or not int(match[2] or 1) or not all(shape):
            raise CollectiveError(
                f"cannot read the algorithm {text[:80]!r}",
                todo='write e.g. "2d_torus", or "h_ring/4 over 2x8" with pieces and levels',
            )
        return cls(match[1], int(match[2] or 1), shape)

    def over(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of its levels for ranks along axes of these sizes, outermost first.

        Raises:
            CollectiveError: it is written for another number of ranks.
        """
        wide = tuple(size for size in sizes if size > 1) or (1,)
        shape = self.shape or wide
        if math.prod(shape) != math.prod(wide):
            raise CollectiveError(
                f"{self} runs among {math.prod(wide)} ranks",
                why=f"it is written for {math.prod(shape)}",
            )
        return shape


@dataclass(frozen=True)
class ChosenRow:
    """One row: calls of a kind over axes, from a number of bytes on, run by an algorithm."""

    kind: str
    axes: tuple[str, ...]
    least: int
    by: str

    def __str__(self) -> str:
        return f"{self.kind} over {', '.join(self.axes)} from {self.least}: {self.by}"

    @classmethod
    def parse(cls, text: str) -> ChosenRow:
        """Parses the result of `str`; CollectiveError for anything else."""
        match = _ROW.fullmatch(text)
        if match is None:
            raise CollectiveError(
                f"cannot read {text[:80]!r}",
                todo='write e.g. "all_reduce over node, gpu from 65536: 2d_torus"',
            )
        if match[4] != LIBRARY:
            Algorithm.parse(match[4])
        axes = tuple(name.strip() for name in match[2].split(","))
        faults = {
            f"there is no collective {match[1]!r}": match[1] not in KINDS,
            "it names an axis twice, or an empty one": len({*axes, ""}) <= len(axes),
        }
        for fault in (fault for fault, there in faults.items() if there):
            raise CollectiveError(
                f"cannot read {text[:80]!r}",
                why=f"{fault}; collectives are {', '.join(KINDS)}",
                todo='write e.g. "all_reduce over node, gpu from 65536: 2d_torus"',
            )
        return cls(match[1], axes, int(match[3]), match[4])


@dataclass(frozen=True)
class ChosenAlgorithms:
    """The calls that an algorithm runs; without rows the library runs all."""

    rows: tuple[ChosenRow, ...] = ()

    def __post_init__(self) -> None:
        known: dict[tuple[str, frozenset[str], int], ChosenRow] = {}
        for row in self.rows:
            other = known.setdefault((row.kind, frozenset(row.axes), row.least), row)
            if other != row:
                raise CollectiveError(
                    f"the rows {str(other)!r} and {str(row)!r} begin at the same size",
                    why="one call cannot be run by two algorithms",
                    todo="leave out one of them, or let it begin at another size",
                )

    @classmethod
    def parse(cls, rows: Sequence[str]) -> ChosenAlgorithms:
        """Reads rows of text; CollectiveError names one that cannot be read."""
        return cls(tuple(map(ChosenRow.parse, rows)))

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def texts(self) -> tuple[str, ...]:
        """The rows as text, which `parse` reads back."""
        return tuple(map(str, self.rows))

    @cached_property
    def _rows(self) -> dict[tuple[str, frozenset[str]], list[ChosenRow]]:
        found: dict[tuple[str, frozenset[str]], list[ChosenRow]] = {}
        for row in sorted(self.rows, key=lambda row: row.least):
            found.setdefault((row.kind, frozenset(row.axes)), []).append(row)
        return found

    def by(self, kind: str, axes: Sequence[str], nbytes: int) -> str:
        """Returns the algorithm of a call, "" for the library's own.

        Args:
            kind: the collective.
            axes: the mesh axes over which it runs.
            nbytes: payload of each device before the call.
        """
        found = ""
        for row in self._rows.get((kind, frozenset(axes)), ()):
            if row.least <= nbytes:
                found = "" if row.by == LIBRARY else row.by
        return found

    def named(self, call: Collective) -> Collective:
        """Returns the call with its algorithm, unchanged if it names one or none is chosen."""
        if not self.rows or call.algorithm:
            return call
        by = self.by(call.kind, call.axes, call.nbytes)
        return replace(call, algorithm=by) if by else call

    def title(self, call: Collective, nbytes: int) -> str:
        """Returns the display name of a call that is sent with others, `nbytes` in all."""
        return self.named(replace(call, nbytes=nbytes)).title

    def check(self, mesh: Mesh) -> None:
        """Refuses rows that do not fit a mesh.

        Raises:
            MeshError: an axis that it does not have.
            CollectiveError: an algorithm for another number of ranks.
        """
        for row in self.rows:
            sizes = [mesh.axis_size(name) for name in row.axes]
            if row.by != LIBRARY:
                Algorithm.parse(row.by).over(sizes)


def directions(step: Step) -> dict[str, str]:
    """Returns the algorithms of a step's two directions, as the arguments `by` and `back`."""
    calls = {"by": step.forward, "back": step.backward}
    return {way: call.algorithm for way, call in calls.items() if call and call.algorithm}


LIBRARY_ONLY = ChosenAlgorithms()

"""Routes of values between the stages of a pipeline, and the placement of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.ir.action import Action, Row
from autopar.ir.crossing import Side, crossing
from autopar.ir.pipeline_step import NO_ADJUSTMENT, Adjustment, flushes
from autopar.ir.tensor import TensorType
from autopar.runtime.generated import Generated
from autopar.runtime.pipeline.messages import Letter, Way

Named = tuple[tuple[str, Letter], ...]  # of values
Ways = tuple[tuple[str, Letter, bool], ...]


@dataclass(frozen=True)
class Placement:
    """The ranks and actions of the stages.

    Attributes:
        ranks: `ranks[copy][stage]` lists the global ranks of that copy of a stage, row-major on the
            stage's mesh. Stages with the same first rank share all their ranks.
        rows: the complete rows of each group of ranks, in any order of groups; see
            `ir/pipeline_step.py`.
        microbatches: number in a step, or in a period of a schedule without flushes.
        adjustment: correction for stale weights.
        first: number of initial periods with flushed rows, and those rows; None for none.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    rows: tuple[tuple[Action, ...], ...]
    microbatches: int
    adjustment: Adjustment = NO_ADJUSTMENT
    first: tuple[int, tuple[Row, ...]] | None = None

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each row."""
        return tuple(self.ranks[row[0].copy][row[0].stage] for row in self.rows)

    @cached_property
    def flushes(self) -> bool:
        """Returns whether a step ends with an update of all stages."""
        return flushes(self.rows)

    def on(self, ranks: Sequence[int]) -> Placement:
        """Returns the placement with `ranks` in place of the global ranks 0, 1, ..."""
        moved = tuple(
            tuple(tuple(ranks[rank] for rank in members) for members in copy) for copy in self.ranks
        )
        return replace(self, ranks=moved)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.ranks[0])

    def row_of(self, rank: int) -> int:
        """Returns the index of the row of a global rank."""
        return next(n for n, ranks in enumerate(self.groups) if rank in ranks)


@dataclass(frozen=True)
class Route:
    """The route of a value from the stage that produces it to one that reads it.

    Attributes:
        value: its name.
        maker, reader: the stages.
        copy: copy of the stages, if there are several.
        there: number of the way of the value.
        back: number of the way of its gradient, None if it has none.
        here: whether both stages are on the same ranks.
    """

    value: str
    maker: int
    reader: int
    copy: int
    there: int
    back: int | None
    here: bool


@dataclass(frozen=True)
class Routes:
    """All routes of a pipeline, in the same order on all ranks."""

    routes: tuple[Route, ...]
    ways: tuple[Way, ...]
    _known: dict[tuple[bool, int, int], Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, modules: Sequence[Generated], placement: Placement) -> Routes:
        """Returns the routes between the results and the received values of the modules."""
        meshes = [module.mesh for module in modules]
        routes: list[Route] = []
        ways: list[Way] = []
        for copy, ranks in enumerate(placement.ranks):
            for reader, module in enumerate(modules):
                for name, value in module.received.items():
                    maker = next(n for n, other in enumerate(modules) if name in other.outputs)
                    dtype, shape, layout = modules[maker].outputs[name]
                    tensor = TensorType(dtype, shape)
                    made = Side(meshes[maker], ranks[maker], layout)
                    read = Side(meshes[reader], ranks[reader], value.layout)
                    there, back = len(ways), None
                    ways.append(Way(tensor, crossing(tensor, made, read)))
                    if value.gradient:
                        back = len(ways)
                        ways.append(Way(tensor, crossing(tensor, read, made)))
                    here = ranks[maker] == ranks[reader]
                    routes.append(Route(name, maker, reader, copy, there, back, here))
        return cls(tuple(routes), tuple(ways))

    def letters(self, action: Action) -> Named:
        """Returns the letters of a transfer by name of value."""
        one, other = action.stage, action.partner
        forwards = action.kind.endswith("F")
        if action.kind in ("RECV_F", "SEND_B"):
            one, other = other, one
        return tuple(
            (route.value, Letter(way, action.microbatch))
            for route in self.routes
            if (route.maker, route.reader, route.copy) == (one, other, action.copy)
            for way in (route.there if forwards else route.back,)
            if way is not None
        )

    def needed(self, action: Action) -> Named:
        """Returns the letters that a computation waits for, by name of value."""
        return tuple((value, letter) for value, letter, _ in self._around(action)[0])

    def made(self, action: Action) -> tuple[tuple[str, Letter, bool], ...]:
        """Returns name and letter of each value to send, and whether its reader is local."""
        return self._around(action)[1]

    def _around(self, action: Action) -> tuple[Ways, Ways]:
        """Returns the incoming and the outgoing ways of an action."""
        kind, stage, microbatch, copy = action[:4]
        if kind == "W":
            return (), ()
        known = self._known.get((kind == "F", stage, copy))
        if known is None:
            mine = [route for route in self.routes if route.copy == copy]
            made = [route for route in mine if route.maker == stage]
            read = [route for route in mine if route.reader == stage]
            sides = (read, made) if kind == "F" else (made, read)
            known = tuple(
                tuple(
                    (route.value, way, route.here)
                    for route in side
                    for way in (route.there if kind == "F" else route.back,)
                    if way is not None
                )
                for side in sides
            )
            self._known[kind == "F", stage, copy] = known
        comes, goes = (
            tuple((value, Letter(way, microbatch), here) for value, way, here in side)
            for side in known
        )
        return comes, goes

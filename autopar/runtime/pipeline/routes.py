"""Routes: which values go from stage to stage of a pipeline, where the stages run, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.action import Action
from autopar.ir.crossing import Side, crossing
from autopar.ir.tensor import TensorType
from autopar.runtime.generated import Generated
from autopar.runtime.pipeline.messages import Letter, Way

Named = tuple[tuple[str, Letter], ...]  # of values


@dataclass(frozen=True)
class Placement:
    """Where the stages are, and what is done there.

    Attributes:
        ranks: `ranks[copy][stage]` are the global ranks of that copy of a stage, row-major on the
            stage's mesh. Stages with the same first rank share their ranks.
        rows: the actions of each group of ranks, in any order of groups.
        microbatches: in a step.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    rows: tuple[tuple[Action, ...], ...]
    microbatches: int

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each row."""
        return tuple(self.ranks[row[0].copy][row[0].stage] for row in self.rows)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.ranks[0])

    def row_of(self, rank: int) -> int:
        """The row of a global rank."""
        return next(n for n, ranks in enumerate(self.groups) if rank in ranks)


@dataclass(frozen=True)
class Route:
    """A value that goes from the stage that makes it to one that reads it.

    Attributes:
        value: its name.
        maker, reader: the stages.
        copy: of the stages, where there are several.
        there: number of its way.
        back: number of its gradient's way, None where there is none.
    """

    value: str
    maker: int
    reader: int
    copy: int
    there: int
    back: int | None


@dataclass(frozen=True)
class Routes:
    """All routes of a pipeline, in one order for all ranks."""

    routes: tuple[Route, ...]
    ways: tuple[Way, ...]
    _around: dict[Action, tuple[Named, Named]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, modules: Sequence[Generated], placement: Placement) -> Routes:
        """The routes that the modules' tables of results and of received values imply."""
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
                    routes.append(Route(name, maker, reader, copy, there, back))
        return cls(tuple(routes), tuple(ways))

    def around(self, action: Action) -> tuple[Named, Named]:
        """What a compute action waits for and what it sends when it has run, by name of value."""
        if action not in self._around:
            self._around[action] = self._find(action)
        return self._around[action]

    def _find(self, action: Action) -> tuple[Named, Named]:
        kind, stage, microbatch, copy = action
        mine = [route for route in self.routes if route.copy == copy]
        made = [route for route in mine if route.maker == stage]
        read = [route for route in mine if route.reader == stage]
        if kind == "W":
            return (), ()
        if kind == "F":
            sides = [[(r.value, r.there) for r in side] for side in (read, made)]
        else:
            sides = [
                [(r.value, r.back) for r in side if r.back is not None] for side in (made, read)
            ]
        waits, sends = (
            tuple((value, Letter(way, microbatch)) for value, way in side) for side in sides
        )
        return waits, sends

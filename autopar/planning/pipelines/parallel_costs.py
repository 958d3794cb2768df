"""Prices stages in several processes at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import lru_cache, partial

from autopar.inter_op.stage_prices import Cell
from autopar.inter_op.stage_values import Candidate
from autopar.inter_op.submeshes import SubMesh
from autopar.ir.mesh import Mesh
from autopar.planning.pipelines.layered import Layered, runs
from autopar.planning.pipelines.stage_costs import StageCosts
from autopar.planning.pipelines.variants import front
from autopar.planning.workers import NOT_PICKLED, Workers


class ParallelCosts:
    """The `stage_cost` of a search that announces which stages it will need.

    Ranges of the same kinds of layers on the same logical mesh are always priced by the same
    process, which remembers their problem and good choices. So the result does not depend on the
    number of processes.

    Args:
        make: makes the object that prices stages, given the model. If it cannot be pickled, this
            process does all the work.
        layered: number of microbatches -> the model on one of them.
        workers: the processes.
    """

    def __init__(
        self,
        make: Callable[[Callable[[int], Layered]], StageCosts],
        layered: Callable[[int], Layered],
        workers: Workers,
    ) -> None:
        self.costs, self.workers = make(layered), workers
        self._make = b""
        with suppress(*NOT_PICKLED):
            self._make = pickle.dumps(make)
        self._place: dict[tuple[Hashable, Mesh, int], int] = {}
        self._known: dict[Cell, tuple[Candidate, ...]] = {}

    def __call__(
        self, first: int, last: int, submesh: SubMesh, microbatches: int
    ) -> tuple[Candidate, ...]:
        """Returns the candidates for layers `first` to `last`; see `StageCosts`."""
        cell = first, last, submesh, microbatches
        self.ahead([cell])
        return self._known[cell]

    def ahead(self, cells: Sequence[Cell]) -> None:
        """Prices stages that the search will need."""
        rows: list[list[Callable[[], list[Candidate]]]] = [[] for _ in range(len(self.workers))]
        requested: list[tuple[Cell, int]] = []
        for cell in cells:
            if cell in self._known:
                continue
            self._known[cell] = ()
            first, last, submesh, microbatches = cell
            model = self.costs.layered(microbatches)
            for mesh in self.costs.meshes(submesh, microbatches):
                place = self._placed(model, first, last, mesh, microbatches, rows)
                on = partial(self.costs.on, first, last, mesh, microbatches)
                if place:
                    on = partial(_elsewhere, self._make, model, first, last, mesh, microbatches)
                rows[place].append(on)
                requested.append((cell, place))
        answers = [iter(row) for row in self.workers.run(rows)]
        by_cell: dict[Cell, list[Candidate]] = {}
        for cell, place in requested:
            by_cell.setdefault(cell, []).extend(next(answers[place]))
        self._known |= {cell: front(row, cell[-1]) for cell, row in by_cell.items()}

    def _placed(
        self,
        model: Layered,
        first: int,
        last: int,
        mesh: Mesh,
        microbatches: int,
        rows: Sequence[Sequence[object]],
    ) -> int:
        """Returns the process for a problem: the same as before, else the least busy process."""
        kinds = tuple((kind, count > 1) for kind, count in runs(model.kinds[first : last + 1]))
        key = kinds, mesh, microbatches
        if key not in self._place:
            places = range(len(rows) if self._make else 1)
            self._place[key] = min(places, key=lambda place: len(rows[place]))
        return self._place[key]


def _elsewhere(
    make: bytes, model: Layered, first: int, last: int, mesh: Mesh, microbatches: int
) -> list[Candidate]:
    """Runs `StageCosts.on` in a process that may not have the model yet."""
    costs = _costs(make)
    costs.know(microbatches, model)
    return costs.on(first, last, mesh, microbatches)


@lru_cache(maxsize=1)
def _costs(make: bytes) -> StageCosts:
    costs: StageCosts = pickle.loads(make)(_not_sent)
    return costs


def _not_sent(microbatches: int) -> Layered:
    raise AssertionError(f"the model on one of {microbatches} microbatches was not sent along")

"""Stage costs, some of them made by a process beside this one before they are asked for."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

from autopar.errors import AutoparError
from autopar.inter_op.stage import Candidate
from autopar.inter_op.submeshes import SubMesh

Cell = tuple[int, int, SubMesh, int]  # first layer, last layer, sub-mesh, microbatches
Costs = Callable[[int, int, SubMesh, int], tuple[Candidate, ...]]
PAYS = 4.0  # seconds that a search has taken before a process is worth its start


class Ahead:
    """Answers as `costs` does.

    Args:
        costs: answers here.
        make: the same for the other process; if it cannot be sent there, there is none.
    """

    def __init__(self, costs: Costs, make: Callable[[], Costs]) -> None:
        self.costs, self._begun = costs, time.perf_counter()
        self._known: dict[Cell, tuple[Candidate, ...] | None] = {}
        self._sent: Cell | None = None
        self._ours: Connection | None = None
        try:
            self._make: bytes | None = pickle.dumps(make)
        except (pickle.PicklingError, AttributeError, TypeError):
            self._make = None  # a rule or a word of the user's own

    def __call__(self, first: int, last: int, part: SubMesh, microbatches: int) -> tuple[
        Candidate, ...
    ]:  # fmt: skip
        """The answer for one stage."""
        cell = (first, last, part, microbatches)
        if self._sent == cell:
            self._take()
        found = self._known.pop(cell, None)
        return self.costs(*cell) if found is None else found

    def ahead(self, cells: Sequence[Cell]) -> None:
        """Take note of what will be asked for, the first one next."""
        late = time.perf_counter() - self._begun > PAYS
        if self._ours is None and self._make is not None and late:
            self._start()
        if self._ours is None:
            return
        if self._sent is not None and self._ours.poll():
            self._take()
        wanted = [cell for cell in cells[1:] if cell not in self._known]
        if self._sent is None and self._ours is not None and wanted:
            self._sent = wanted[0]
            self._ours.send(self._sent)

    def close(self) -> None:
        """End the other process."""
        if self._ours is not None:
            self._process.kill()
            self._process.join()
            self._ours.close()
            self._ours = None

    def _start(self) -> None:
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def _take(self) -> None:
        """The answer that the other process was asked for; None from one that has ended."""
        assert self._ours is not None
        assert self._sent is not None
        try:
            self._known[self._sent] = self._ours.recv()
        except (EOFError, OSError):
            self.close()
            self._make = None
        self._sent = None


def _serve(make: bytes, theirs: Connection) -> None:
    """Answers until the other side ends; None where an answer is an error, which is made there."""
    costs: Costs = pickle.loads(make)()
    while True:
        try:
            cell: Cell = theirs.recv()
        except EOFError:
            return
        try:
            theirs.send(costs(*cell))
        except AutoparError:
            theirs.send(None)

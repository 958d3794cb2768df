"""Processes that share the work of planning."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from autopar.errors import AutoparError

T = TypeVar("T")
NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
_MOST = 3  # processes besides this one: batches are small, and each holds torch in its memory


class Workers:
    """This process and others beside it; they end with it, and with a `with` block.

    Args:
        others: how many processes besides this one; None: one for each other core, up to three.
    """

    def __init__(self, others: int | None = None) -> None:
        if others is None:
            others = min((os.cpu_count() or 1) - 1, _MOST)
        self._others = [_Other() for _ in range(others)]

    def __len__(self) -> int:
        return 1 + len(self._others)

    def run(self, jobs: Sequence[Sequence[Callable[[], T]]]) -> list[list[T]]:
        """What jobs return; row by row, each row by a process of its own, the first by this one.

        What another process does not answer (its job cannot be pickled, raises an error, or the
        process has ended) is worked out here.

        Args:
            jobs: at most as many rows as there are processes.
        """
        rows = list(zip(self._others, jobs[1:], strict=False))
        asked = [other if row and other.ask(row) else None for other, row in rows]
        try:
            own = [[job() for job in row] for row in jobs[:1]]
        finally:  # so that no answer is taken for that to a later question
            answers = [None if other is None else other.answer() for other in asked]
        for (_, row), answer in zip(rows, answers, strict=True):
            own.append([job() for job in row] if answer is None else answer)
        return own

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for other in self._others:
            other.end()
        self._others = []


class _Other:
    """Another process, which works on one row of jobs at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.end = weakref.finalize(self, process.kill)

    def ask(self, jobs: Sequence[Callable[[], object]]) -> bool:
        """Whether the jobs are worked on."""
        try:
            self._ours.send_bytes(pickle.dumps(jobs))
        except (OSError, *NOT_PICKLED):
            return False
        return True

    def answer(self) -> list[Any] | None:
        """What the jobs return, None if one raises an error of ours or the process has ended."""
        try:
            found: list[Any] | None = self._ours.recv()
        except (EOFError, OSError):
            return None
        return found


def _serve(theirs: Connection) -> None:
    """Answers until the other side ends."""
    while True:
        try:
            jobs = pickle.loads(theirs.recv_bytes())
        except EOFError:
            return
        try:
            answers = [job() for job in jobs]
        except AutoparError:
            answers = None  # who asked meets it as well
        theirs.send(answers)

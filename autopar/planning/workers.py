"""Processes that share the work of planning."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from autopar.errors import AutoparError

T = TypeVar("T")
NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
_MOST = 3  # other processes; batches are small, and each process loads torch


class Workers:
    """This process and worker processes, which end with it or with a `with` block.

    Args:
        others: number of other processes; None for one on each other core, up to three.
    """

    def __init__(self, others: int | None = None) -> None:
        if others is None:
            others = min((os.cpu_count() or 1) - 1, _MOST)
        self._others = [_Worker() for _ in range(others)]

    def __len__(self) -> int:
        return 1 + len(self._others)

    def run(self, jobs: Sequence[Sequence[Callable[[], T]]]) -> list[list[T]]:
        """Runs rows of jobs, each row in a process of its own, the first in this one.

        A row is run here if another process does not answer: if its jobs cannot be pickled, one
        raises an error, or the process has ended.

        Args:
            jobs: at most as many rows as there are processes.

        Returns:
            The results, row by row.
        """
        rows = list(zip(self._others, jobs[1:], strict=False))
        asked = [other if row and other.ask(row) else None for other, row in rows]
        try:
            own = [[job() for job in row] for row in jobs[:1]]
        finally:  # read all answers, so that none is taken for that of a later request
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


class _Worker:
    """Another process, which runs one row of jobs at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, gc.get_threshold()), daemon=True)
        process.start()
        theirs.close()
        self.end = weakref.finalize(self, _end, process)

    def ask(self, jobs: Sequence[Callable[[], object]]) -> bool:
        """Sends jobs; returns whether the process received them."""
        try:
            self._ours.send_bytes(pickle.dumps(jobs))
        except (OSError, *NOT_PICKLED):
            return False
        return True

    def answer(self) -> list[Any] | None:
        """Returns the results, or None if a job raised an AutoparError or the process has ended."""
        try:
            results: list[Any] | None = self._ours.recv()
        except (EOFError, OSError):
            return None
        return results


def _end(process: SpawnProcess) -> None:
    """Ends a process; its processor seconds then count among those of child processes."""
    process.kill()
    process.join()


def _serve(theirs: Connection, collecting: tuple[int, int, int]) -> None:
    """Runs jobs until the other end closes, collecting garbage as the asking process does."""
    gc.set_threshold(*collecting)
    while True:
        try:
            jobs = pickle.loads(theirs.recv_bytes())
        except EOFError:
            return
        try:
            answers = [job() for job in jobs]
        except AutoparError:
            answers = None  # the asking process runs the jobs itself and raises the error
        theirs.send(answers)

"""Handles of saves in progress, whose failure is reported even if the handle is dropped."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.dcp import ranks_lost
from autopar.runtime.ranks.failure import Watch


class Saving:
    """A checkpoint that is being written, or has been.

    A failure that the user did not query is raised by the program's next save or load, on all
    ranks; if there is none, the process reports it at its end, with status 1.

    Args:
        path: the checkpoint's folder.
        future: the write.
        watch: detects lost ranks.

    Attributes:
        path: the checkpoint's folder.
    """

    def __init__(self, path: Path, future: Future[None], watch: Watch) -> None:
        self.path, self._future, self._watch = path, future, watch
        self._asked = False
        atexit.register(self._complain)
        future.add_done_callback(self._ended)

    def done(self) -> bool:
        """Returns whether `result` returns or raises at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Waits until every rank has written its part; returns the folder.

        Raises:
            CheckpointError: it was not written; a previous checkpoint is unchanged.
            RankFailedError: it was not written either, since a rank was lost.
            TimeoutError: `timeout` seconds were not enough.
        """
        error = self._future.exception(timeout)
        self._asked = True
        atexit.unregister(self._complain)
        if error is None:
            return self.path
        if isinstance(error, (RuntimeError, dist.DistError)):
            with ranks_lost(f"the checkpoint {self.path} was not saved"), self._watch:
                raise error
        raise error

    def unheard(self) -> BaseException | None:
        """Waits for the end; returns a failure that was not yet raised, and marks it as raised."""
        error = self._future.exception()
        if self._asked or error is None:
            return None
        self._asked = True
        atexit.unregister(self._complain)
        return error

    def _ended(self, future: Future[None]) -> None:
        if future.exception() is None:
            atexit.unregister(self._complain)

    def _complain(self) -> None:
        """Reports at the end of the process, when an error can no longer be caught or raised."""
        error = self._future.exception() if self._future.done() else None
        if error is not None:
            sys.stderr.write(f"the last save failed: {error}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@contextmanager
def taking(what: str) -> Iterator[None]:
    """Returns a context that raises CheckpointError for any error of loading a state."""
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise CheckpointError(
            f"{what} does not accept its state",
            why=f"{type(error).__name__}: {error}",
            todo="pass one of the kind that was saved",
        ) from error

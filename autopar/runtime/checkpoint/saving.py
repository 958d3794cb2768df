"""A checkpoint that is being written: whoever lets go of it hears of its failure all the same."""

from __future__ import annotations

import atexit
import os
import sys
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from autopar.runtime.checkpoint.dcp import ranks_lost
from autopar.runtime.ranks.failure import Watch


class Saving:
    """A checkpoint that is being written, or is.

    A failure that nobody has asked for is raised by the program's next save or load, on all ranks;
    where there is none, the process says it when it ends, with status 1.

    Args:
        path: where it is to be.
        future: what writes it.
        watch: finds out who was lost.

    Attributes:
        path: where it is to be.
    """

    def __init__(self, path: Path, future: Future[None], watch: Watch) -> None:
        self.path, self._future, self._watch = path, future, watch
        self._asked = False
        atexit.register(self._complain)
        future.add_done_callback(self._ended)

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until every rank has written its part; the folder.

        Raises:
            CheckpointError: it was not written; what was there before still is.
            RankFailedError: neither, since a rank was lost.
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
        """Wait for the end; the failure that nobody has asked for, which is heard then."""
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
        """The process ends: nobody is left to catch an error, and exit handlers cannot raise."""
        error = self._future.exception() if self._future.done() else None
        if error is not None:
            sys.stderr.write(f"the last save failed: {error}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

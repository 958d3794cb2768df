"""A function that another process calls beside this one."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Generic, ParamSpec, TypeVar

from autopar.errors import AutoparError

P = ParamSpec("P")
T = TypeVar("T")


class Beside(Generic[P, T]):
    """One call at a time: `ask`, and what it returns from `answer`. The process ends with this.

    Args:
        make: makes the function, there.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: `make` cannot be sent to a process.
    """

    def __init__(self, make: Callable[[], Callable[P, T]]) -> None:
        context = get_context("spawn")
        sent = pickle.dumps(make)
        self._ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(sent, theirs), daemon=True)
        process.start()
        theirs.close()
        weakref.finalize(self, process.kill)

    def ask(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the function there."""
        with suppress(OSError):  # it has ended, which the answer tells
            self._ours.send((args, kwargs))

    def answer(self) -> T | None:
        """What it returned; None if it raised an error of ours, or the process has ended."""
        try:
            found: T | None = self._ours.recv()
        except (EOFError, OSError):
            return None
        return found


def _serve(sent: bytes, theirs: Connection) -> None:
    """Answers until the other side ends."""
    function = pickle.loads(sent)()
    while True:
        try:
            args, kwargs = theirs.recv()
        except EOFError:
            return
        try:
            answer = function(*args, **kwargs)
        except AutoparError:
            answer = None  # the caller meets it as well
        theirs.send(answer)

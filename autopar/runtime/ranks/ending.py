"""Reports to the other ranks how a process ends: with an uncaught error, or without one.

Python's hooks are chained: existing hooks run first, and so do those installed later.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

_PATIENCE = 10.0  # seconds
Tell = Callable[[BaseException | None], None]


class Ending:
    """Calls `tell` with the error that ends this process or its training thread, or with None.

    Args:
        tell: a bound method, whose object is not kept alive.
        thread: returns the identity of the training thread.
        watcher: a thread that must end before the process does.
    """

    def __init__(
        self, tell: Tell, thread: Callable[[], int | None], watcher: threading.Thread
    ) -> None:
        self._tell = weakref.WeakMethod(tell)
        self._thread, self._watcher = thread, watcher
        self.over = False
        self._last: Finalize[None] | None = None
        self._process = os.getpid()  # not a fork of it
        self._before = sys.excepthook
        self._before_of_threads = threading.excepthook

    def listen(self) -> None:
        """Installs the hooks."""
        sys.excepthook = self.uncaught
        threading.excepthook = self.uncaught_in_thread
        # Unlike atexit's, multiprocessing's finalisers also run at the end of its own processes.
        self._last = Finalize(None, self.at_end, exitpriority=100)

    def uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Handles an error that nothing catches, as Python's excepthook."""
        try:
            self._before(kind, error, trace)
        finally:
            self._say(error)

    def uncaught_in_thread(self, args: Any) -> None:
        """Handles an error that nothing catches in a thread."""
        thread = args.thread
        if args.exc_value is not None and thread is not None and thread.ident == self._thread():
            self._say(args.exc_value)
        self._before_of_threads(args)

    def at_end(self) -> None:
        """Runs before the process ends, perhaps because of an error."""
        error = sys.exc_info()[1]
        self._say(None if isinstance(error, SystemExit) else error)
        self._say(None)
        self._watcher.join(_PATIENCE)

    def _say(self, error: BaseException | None) -> None:
        tell = self._tell()
        if tell is not None and not self.over and os.getpid() == self._process:
            tell(error)

    def close(self) -> None:
        """Removes the hooks, or disables them where others are chained to them.

        If the watcher itself calls this, the end of the process still waits for it.
        """
        self.over = True
        if self._last is not None and threading.current_thread() is not self._watcher:
            self._last.cancel()
        while True:
            hook = getattr(sys.excepthook, "__self__", None)
            if not (isinstance(hook, Ending) and hook.over):
                break
            sys.excepthook = hook._before
        while True:
            hook = getattr(threading.excepthook, "__self__", None)
            if not (isinstance(hook, Ending) and hook.over):
                break
            threading.excepthook = hook._before_of_threads

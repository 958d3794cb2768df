"""A trace of where a command spends its time, sampled while it runs, for ui.perfetto.dev.

A thread samples the stack of the main thread every few milliseconds. A function of autopar that
occurs in consecutive samples is one slice, below the function that called it. Unlike a hook at
every call, sampling does not change the measured times.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import click

from autopar.cli.common.console import FILE

PROFILE = click.option(
    "--profile-planning",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    expose_value=False,
    callback=lambda ctx, _, path: ctx.with_resource(profiled(path)),
    help="Write a profile of the planning time to this file, for ui.perfetto.dev.",
)
EVERY = 0.002  # seconds between two samples
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_IMPORT = "import"


def profiled(path: Path | None) -> Any:
    """Returns a context that writes the trace of its body to a file; none without a file."""
    return nullcontext() if path is None else _profiled(path)


@contextmanager
def _profiled(path: Path) -> Iterator[None]:
    sampler = Sampler(threading.get_ident())
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()
        FILE.write(path, json.dumps({"traceEvents": sampler.events()}))


class Sampler(threading.Thread):
    """Samples the stack of a thread until it is stopped.

    Args:
        thread: its identity.
    """

    def __init__(self, thread: int) -> None:
        super().__init__(daemon=True)
        self._watched, self._ended = thread, threading.Event()
        self._began = time.perf_counter()
        self._stack: list[tuple[str, float]] = []  # open slices, outermost first
        self._slices: list[tuple[str, float, float]] = []

    def run(self) -> None:
        """Takes samples."""
        while not self._ended.wait(EVERY):
            self._see(_names(self._watched), time.perf_counter() - self._began)

    def stop(self) -> None:
        """Ends the last slices."""
        self._ended.set()
        self.join()
        self._see([], time.perf_counter() - self._began)

    def events(self) -> list[dict[str, object]]:
        """Returns the slices as complete events of a trace, in microseconds."""
        return [
            {
                "name": name, "cat": name.partition(":")[0], "ph": "X", "pid": 1, "tid": 1,
                "ts": round(1e6 * begin), "dur": round(1e6 * (end - begin)),
            }
            for name, begin, end in sorted(self._slices, key=lambda each: (each[1], -each[2]))
        ]  # fmt: skip

    def _see(self, names: list[str], now: float) -> None:
        """Closes the slices of functions that have returned, and opens slices of new functions."""
        same = 0
        for (open_name, _), name in zip(self._stack, names, strict=False):
            if open_name != name:
                break
            same += 1
        for name, begin in reversed(self._stack[same:]):
            self._slices.append((name, begin, now))
        self._stack[same:] = [(name, now) for name in names[same:]]


def _names(thread: int) -> list[str]:
    """Returns the functions of autopar on a thread's stack, outermost first; imports are one.

    No frame is kept, nor the values in it, which a trace of a model would find still in use.
    """
    names: list[str] = []
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_HOME) and code.co_name != "<module>":
            module = code.co_filename.removeprefix(_HOME).removesuffix(".py").replace(os.sep, ".")
            names.append(f"{module}:{code.co_qualname}")
        elif code.co_name == "_find_and_load" and names[-1:] != [_IMPORT]:
            names.append(_IMPORT)
        frame = frame.f_back
    return names[::-1]

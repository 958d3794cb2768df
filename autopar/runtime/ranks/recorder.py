"""A flight recorder: a ring of the last events that this process began and ended.

Events are collectives and messages, each with its step, its part of the step and its line of the
generated program. Ranks number the events of a channel alike, so that their records can be compared
(`diagnosis.py`). A rank waits in an event that was begun and has not ended; under NCCL an event
ends when it is launched, and torch has its own recorder for those.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autopar.runtime.step_parts import part

SIZE = 256  # number of events kept
_DEPTH = 16  # frames searched for a line of a generated program
Place = tuple[str, int]  # file and line


class WaitTime:
    """The time that a rank has waited in calls.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


class Event:
    """A collective or a message of this rank.

    Attributes:
        channel: name of its channel.
        number: its number on the channel, from 1; equal on all ranks of it.
        kind: all_reduce, send, ...
        nbytes: bytes that this rank sends, or receives as a message.
        step, part: when in the training it was begun.
        place: the generated line that it comes from, if there is one.
        began, ended: seconds since the epoch; 0.0 until it ends.
        waiting: whether this rank does nothing else until it ends.
        since: when it began to wait.
        waited: the time that the rank has waited so far.
    """

    __slots__ = (
        "began",
        "channel",
        "ended",
        "kind",
        "nbytes",
        "number",
        "part",
        "place",
        "since",
        "step",
        "waited",
        "waiting",
    )

    def __init__(
        self, channel: str, number: int, kind: str, nbytes: int, step: int, part: str, place: Place
    ) -> None:
        self.channel, self.number, self.kind, self.nbytes = channel, number, kind, nbytes
        self.step, self.part, self.place = step, part, place
        self.began, self.ended, self.waiting = time.time(), 0.0, True
        self.since, self.waited = self.began, WaitTime()

    def wait(self) -> None:
        """Records that the rank waits for it from now on."""
        self.waiting, self.since = True, time.time()


class Recorder:
    """The record of one process.

    Attributes:
        steps: number of steps begun.
        running: whether one of them is running.
        origin: the generated line that events are attributed to, None for the running one.
        begun: number of events begun on each channel.
        members: global ranks of each channel.
        changed: when a part of a step began or ended last.
        thread: the thread that made the last step.
        waited: the time in calls that this rank waited for.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._ring: list[Event | None] = [None] * size
        self._next = 0
        self._parts: list[str] = []
        self.steps = 0
        self.running = False
        self.origin: Place | None = None
        self.begun: dict[str, int] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.changed = time.time()
        self.thread = threading.main_thread().ident
        self.waited = WaitTime()

    def begin(
        self, channel: str, ranks: tuple[int, ...], kind: str, nbytes: int, waiting: bool = True
    ) -> Event:
        """Records the beginning of an event of these ranks; the caller must `end` it."""
        if channel not in self.members:
            self.members[channel] = ranks
        number = self.begun[channel] = self.begun.get(channel, 0) + 1
        place = self.origin or generated_line(sys._getframe(1))
        event = Event(channel, number, kind, nbytes, self.steps, self.doing, place)
        event.waiting, event.waited = waiting, self.waited
        self._ring[self._next % len(self._ring)] = event
        self._next += 1
        return event

    @staticmethod
    def end(event: Event) -> None:
        """Records that an event has succeeded; a failed event remains unchanged."""
        ended = time.time()
        if event.waiting and not event.ended:
            event.waited.seconds += ended - event.since
        event.ended = ended

    @property
    def doing(self) -> str:
        """The running part of a step, or other activity."""
        return self._parts[-1] if self._parts else ""

    @property
    def events(self) -> list[Event]:
        """Returns the kept events, oldest first."""
        first = self._next % len(self._ring)
        return [e for e in (*self._ring[first:], *self._ring[:first]) if e is not None]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Returns the context of a step."""
        self.steps += 1
        self._parts.clear()  # parts of a step that failed
        self.running, self.thread = True, threading.get_ident()
        try:
            yield
        finally:
            self.running, self.changed = False, time.time()

    @contextmanager
    def part(self, kind: str, name: object) -> Iterator[None]:
        """Returns the context of a part of a step, or before the first; a profile shows it too."""
        with self.within(name), part(kind, name):
            yield

    @contextmanager
    def within(self, name: object) -> Iterator[None]:
        """Returns the context of a part that a profile does not show."""
        depth = len(self._parts)
        self._parts.append(f"{self.doing}, {name}" if depth else str(name))
        self.changed = time.time()
        yield
        # After an error the part stays until the next step, as the place of the error.
        del self._parts[depth:]
        self.changed = time.time()

    def now(self, name: str) -> None:
        """Sets the current activity outside steps; "" for none."""
        self._parts[:] = [name] if name else []
        self.changed = time.time()

    @contextmanager
    def on_behalf_of(self, place: Place) -> Iterator[None]:
        """Returns a context whose events belong to an earlier generated line, for its backward."""
        before, self.origin = self.origin, place
        try:
            yield
        finally:
            self.origin = before


def generated_line(frame: FrameType | None) -> Place:
    """Returns the innermost running line of a generated program; ("", 0) outside of one."""
    for _ in range(_DEPTH):
        if frame is None:
            break
        if "MESH" in frame.f_globals and "parameters" in frame.f_globals:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0

"""A flight recorder: what this process began and ended last, in a ring of fixed size.

Collectives and messages are its events, each with the step, the part of the step and the line of
the generated program that it belongs to. Ranks number the events of a channel alike, so that their
records can be compared (`diagnosis.py`). An event that was begun and has not ended is where a rank
waits; under NCCL an event ends when it is launched, and torch has a recorder of its own for those.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autopar.runtime.step_parts import part

SIZE = 256  # events that are kept
_DEPTH = 16  # frames that are searched for a line of a generated program
Place = tuple[str, int]  # file and line


class Event:
    """A collective or a message of this rank.

    Attributes:
        channel: name of what it goes through.
        number: its place among those of the channel, from 1; alike on all ranks of it.
        kind: all_reduce, send, ...
        nbytes: what this rank sends, or receives as a message.
        step, part: where in the training it was begun.
        place: the generated line that it comes from, if there is one.
        began, ended: seconds since the epoch; 0.0 while it goes on.
        waiting: whether this rank does nothing else until it ends.
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
        "step",
        "waiting",
    )

    def __init__(
        self, channel: str, number: int, kind: str, nbytes: int, step: int, part: str, place: Place
    ) -> None:
        self.channel, self.number, self.kind, self.nbytes = channel, number, kind, nbytes
        self.step, self.part, self.place = step, part, place
        self.began, self.ended, self.waiting = time.time(), 0.0, True


class Recorder:
    """The record of one process.

    Attributes:
        steps: how many steps were begun.
        running: whether one of them goes on.
        origin: the generated line in whose name events are recorded, None for the one that runs.
        begun: of each channel, how many events were begun.
        members: of each channel, the global ranks.
        changed: when a part of a step began or ended last.
        thread: the thread that made the last step.
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

    def begin(
        self, channel: str, ranks: tuple[int, ...], kind: str, nbytes: int, waiting: bool = True
    ) -> Event:
        """Record that an event of these ranks begins; it is the caller's to `end`."""
        if channel not in self.members:
            self.members[channel] = ranks
        number = self.begun[channel] = self.begun.get(channel, 0) + 1
        place = self.origin or generated_line(sys._getframe(1))
        event = Event(channel, number, kind, nbytes, self.steps, self.doing, place)
        event.waiting = waiting
        self._ring[self._next % len(self._ring)] = event
        self._next += 1
        return event

    @staticmethod
    def end(event: Event) -> None:
        """Record that an event has ended well; one that fails stays where it is."""
        event.ended = time.time()

    @property
    def doing(self) -> str:
        """The part of a step that goes on, or what else does."""
        return self._parts[-1] if self._parts else ""

    @property
    def events(self) -> list[Event]:
        """Those that are kept, oldest first."""
        first = self._next % len(self._ring)
        return [e for e in (*self._ring[first:], *self._ring[:first]) if e is not None]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside is a step."""
        self.steps += 1
        self._parts.clear()  # of a step that failed
        self.running, self.thread = True, threading.get_ident()
        try:
            yield
        finally:
            self.running, self.changed = False, time.time()

    @contextmanager
    def part(self, kind: str, name: object) -> Iterator[None]:
        """Inside is a part of a step, or of what goes before the first; a profile shows it too."""
        with self.within(name), part(kind, name):
            yield

    @contextmanager
    def within(self, name: object) -> Iterator[None]:
        """Inside is such a part, which a profile does not show."""
        depth = len(self._parts)
        self._parts.append(f"{self.doing}, {name}" if depth else str(name))
        self.changed = time.time()
        yield
        # After an error it stays until the next step: the record says where that was.
        del self._parts[depth:]
        self.changed = time.time()

    def now(self, name: str) -> None:
        """From here on the process does this, which is no part of a step; "" for nothing."""
        self._parts[:] = [name] if name else []
        self.changed = time.time()

    @contextmanager
    def on_behalf_of(self, place: Place) -> Iterator[None]:
        """Inside, events belong to a generated line that ran before: its backward has no other."""
        before, self.origin = self.origin, place
        try:
            yield
        finally:
            self.origin = before


def generated_line(frame: FrameType | None) -> Place:
    """The innermost line of a generated program that runs; ("", 0) outside of one."""
    for _ in range(_DEPTH):
        if frame is None:
            break
        if "MESH" in frame.f_globals and "parameters" in frame.f_globals:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0

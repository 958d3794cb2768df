"""The record of a rank as a value: the content of a dump, and a rank's report to its peers."""

from __future__ import annotations

import json
import linecache
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import DumpError
from autopar.runtime.ranks.recorder import Event, Recorder

FORMAT = 1
MOST_BYTES = 16 << 20  # most bytes of a file that is read
MOST_RANKS = 1 << 20
_FRAMES = 16
_LETTERS = 2000  # most characters of one text


@dataclass(frozen=True)
class Entry:
    """An event; attributes as in `Event`, with `text` the generated line."""

    channel: str
    number: int
    kind: str
    nbytes: int
    step: int
    part: str
    file: str
    line: int
    text: str
    began: float
    ended: float
    waiting: bool

    @classmethod
    def of(cls, event: Event) -> Entry:
        """Returns the entry of an event."""
        file, line = event.place
        return cls(
            event.channel, event.number, event.kind, event.nbytes, event.step, event.part,
            file, line, linecache.getline(file, line).strip()[:_LETTERS] if file else "",
            event.began, event.ended, event.waiting,
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A rank at one moment.

    Attributes:
        rank, world, host, pid: the process.
        time: seconds since the epoch.
        steps: number of steps begun.
        running: whether the last of them is still running.
        doing: the part of a step, or of the time before the first, that is running or failed.
        since: when that or a step began or ended last.
        begun: number of events begun on each channel.
        members: global ranks of those channels.
        events: the last ones, oldest first.
        stack: lines of Python that the training thread runs, the innermost last.
        reason: why the record was taken.
    """

    rank: int
    world: int
    host: str
    pid: int
    time: float
    steps: int
    running: bool
    doing: str
    since: float
    begun: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    events: tuple[Entry, ...] = ()
    stack: tuple[str, ...] = ()
    reason: str = ""

    @classmethod
    def of(
        cls, recorder: Recorder, rank: int, world: int, reason: str = "", whole: bool = True
    ) -> Record:
        """Returns this rank's current record, with all events, or only those it waits for."""
        events = [e for e in recorder.events if whole or (e.waiting and not e.ended)]
        open_ = {e.channel for e in events}
        members = {k: v for k, v in dict(recorder.members).items() if whole or k in open_}
        return cls(
            rank, world, socket.gethostname(), os.getpid(), time.time(),
            recorder.steps, recorder.running, recorder.doing, recorder.changed,
            dict(recorder.begun), members, tuple(map(Entry.of, events)),
            stack_of(recorder.thread), reason,
        )  # fmt: skip

    @property
    def waiting(self) -> Entry | None:
        """The event that this rank waits for."""
        return next((e for e in reversed(self.events) if e.waiting and not e.ended), None)

    @property
    def at(self) -> str:
        """Its place in the training."""
        if self.running:
            return f"in step {self.steps}" + (f", {self.doing}" if self.doing else "")
        if self.doing:
            return f"in {self.doing}"
        return f"between steps, after step {self.steps}" if self.steps else "before the first step"

    def describe(self) -> str:
        """Describes what the rank was doing, in a line."""
        parts = [self.at]
        entry = self.waiting
        if entry is not None:
            ranks = ", ".join(map(str, self.members.get(entry.channel, ())))
            parts.append(f"{entry.kind} of {entry.nbytes} bytes among ranks {ranks}")
            if entry.file:
                parts.append(f"{entry.file}:{entry.line} {entry.text}")
        if self.stack and (entry is None or not entry.file):
            parts.append(self.stack[-1])
        parts.append(f"for {max(self.time - self.since, 0.0):.0f} s")
        return "; ".join(parts)

    def write(self) -> str:
        """Returns the text of a dump."""
        return json.dumps({"autopar_record": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, text: str, where: str = "a record") -> Record:
        """Parses a record; raises DumpError if the text is malformed."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refused(where, str(error)) from None
        if not isinstance(value, dict) or value.pop("autopar_record", None) != FORMAT:
            raise _refused(where, f"it is not a record in format {FORMAT}")
        try:
            return _record(value)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise _refused(where, f"{type(error).__name__}: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Record:
        """Reads a record from a file; raises DumpError if it cannot be read or is malformed."""
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise _refused(str(path), str(error)) from None
        if len(data) > MOST_BYTES:
            raise _refused(str(path), f"it is longer than {MOST_BYTES} bytes")
        return cls.read(data.decode("utf-8", errors="replace"), str(path))


def stack_of(thread: int | None) -> tuple[str, ...]:
    """Returns the lines of Python that a thread runs, the innermost last; () if it is gone."""
    frame = sys._current_frames().get(-1 if thread is None else thread)
    if frame is None:
        return ()
    frames = traceback.extract_stack(frame, None)[-_FRAMES:]
    return tuple(f"{line.filename}:{line.lineno} in {line.name}" for line in frames)


def _refused(where: str, why: str) -> DumpError:
    return DumpError(
        "a dump cannot be read",
        where=plain(where),
        why=plain(why),
        todo="it may be half-written; leave it out",
    )


def plain(text: str) -> str:
    """Returns a text as one line without terminal control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:_LETTERS])


_KINDS: dict[str, Any] = {"int": int, "str": str, "float": float, "bool": bool}


def _value(kind: str, value: Any) -> Any:
    """Returns a plain value of a kind; raises TypeError or ValueError otherwise."""
    wanted = _KINDS[kind]
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise TypeError(f"{value!r:.50} is not a {kind}")
    if wanted is int and not -1 <= value < 1 << 63:
        raise ValueError(f"{value!r:.50} is out of range")
    if wanted is float and not math.isfinite(value):
        raise ValueError("a time is not finite")
    return plain(value) if wanted is str else value


def _plain_fields(kind: type, value: Any) -> dict[str, Any]:
    """Returns the values of a dataclass's plain fields."""
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.50} is not a mapping")
    return {
        f.name: _value(str(f.type), value[f.name]) for f in fields(kind) if str(f.type) in _KINDS
    }


def _record(value: dict[str, Any]) -> Record:
    entries = _plain_fields(Record, value)
    rank, world = entries["rank"], entries["world"]
    if not 0 <= rank < world <= MOST_RANKS:
        raise ValueError(f"rank {rank} of {world}")
    begun = {plain(k): _value("int", v) for k, v in _mapping(value["begun"]).items()}
    members = {
        plain(k): tuple(_value("int", rank) for rank in _list(v))
        for k, v in _mapping(value["members"]).items()
    }
    if any(not 0 <= rank < world for ranks in members.values() for rank in ranks):
        raise ValueError("a member of a channel is not a rank")
    return Record(
        **entries,
        begun=begun,
        members=members,
        events=tuple(Entry(**_plain_fields(Entry, one)) for one in _list(value["events"])),
        stack=tuple(_value("str", line) for line in _list(value["stack"])),
    )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.50} is not a mapping")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.50} is not a list")
    return value

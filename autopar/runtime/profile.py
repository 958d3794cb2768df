"""A measured step as a picture in time, for ui.perfetto.dev: what every rank did when.

torch's profiler records the step on every rank. What is kept of it: the parts of the step
(parts.py), the outermost operators, calls of collectives, what is sent, and kernels of
accelerators. The first rank writes all ranks into one file, a process row for each, in the form of
simulated traces.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from autopar.errors import ProgramError
from autopar.runtime.ranks.processes import from_first_rank
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.step_parts import CLOCK, WAIT, part, read_part

_STEP, _OPERATORS, _DEVICE, _CALLS, _NETWORK = "step", "operators", "stream", "calls", "network"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """Something that one rank did, in microseconds of its own clock."""

    row: str
    kind: str
    name: str
    start: float
    length: float


@contextmanager
def profiled(path: str | Path | None, settle: Callable[[], None]) -> Iterator[None]:
    """Profile what is done inside, a step, and write it to `path`; nothing without a path.

    All ranks enter it, with one path; the first one writes.

    Args:
        path: of the file.
        settle: waits for calls that are under way between two steps: their threads must not meet a
            profiler that starts or stops.

    Raises:
        ProgramError: the file cannot be written; on every rank.
    """
    if path is None:
        yield
        return
    settle()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities) as recording:
        everyone = Peers.here().everyone
        if everyone is not None:
            everyone.barrier()
        with part(CLOCK, ""):  # about the same moment on all ranks
            pass
        yield
        settle()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    ranks = _gathered((socket.gethostname(), _events(_raw(recording))))
    from_first_rank(lambda: _write(Path(path), merged(ranks)))


def _raw(recording: torch_profile) -> list[dict[str, Any]]:
    """What torch's profiler recorded, as Chrome's events."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recording.export_chrome_trace(str(file))
        # Names of kernels may hold bytes that are no text.
        found = json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False)
    events: list[dict[str, Any]] = found["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _events(raw: Sequence[dict[str, Any]]) -> list[Event]:
    """What is shown of a rank."""
    found: list[Event] = []
    operators: list[tuple[str, Any, float, float, str]] = []
    for event in raw:
        name, category = str(event["name"]), event.get("cat", "")
        span = (float(event["ts"]), float(event["dur"]))
        named = read_part(name) if category == "user_annotation" else None
        if named is not None:
            found.append(Event(_STEP, *named, *span))
        elif name.startswith(("gloo:", "nccl:")) and category != "gpu_user_annotation":
            found.append(Event(_NETWORK, "communication", name, *span))
        elif category in _KERNELS:
            found.append(Event(f"{_DEVICE} {event['tid']}", category, name, *span))
        elif category == "cpu_op":
            operators.append((_OPERATORS, event["tid"], *span, name))
            if "c10d" in name:  # it may wait for others, inside another operator
                operators.append((_CALLS, event["tid"], *span, name))
    ends: dict[tuple[str, Any], float] = {}
    for row, thread, start, length, name in sorted(operators, key=lambda one: (one[2], -one[3])):
        if start >= ends.get((row, thread), 0.0):
            ends[row, thread] = start + length
            found.append(Event(row, "call" if row == _CALLS else "operator", name, start, length))
    return found


def _gathered(own: tuple[str, list[Event]]) -> list[tuple[str, list[Event]]]:
    """Every rank's, on the first one."""
    everyone = Peers.here().everyone
    return [own] if everyone is None else everyone.gather_object(own, 0)


def merged(ranks: Sequence[tuple[str, Sequence[Event]]]) -> str:
    """All ranks in one trace: hosts with their ranks' events, in rank order.

    A host has one clock; those of several hosts are set alike where their last ranks left the
    barrier before the step.
    """
    zero: dict[str, float] = {}
    for host, events in ranks:
        left = max(event.start for event in events if event.kind == CLOCK)
        zero[host] = max(zero.get(host, left), left)
    made: list[dict[str, Any]] = []
    for rank, (host, events) in enumerate(ranks):
        waits = [event.length for event in events if event.kind == WAIT]
        waiting = f", waits {sum(waits) / 1e6:.6f} s for others" if waits else ""
        made += _rows(rank, f"rank {rank} on {host}, measured{waiting}", events, zero[host])
    return json.dumps({"traceEvents": made, "displayTimeUnit": "ms"})


def _rows(rank: int, title: str, events: Sequence[Event], zero: float) -> list[dict[str, Any]]:
    """One process of the trace."""
    lanes = _lanes([event for event in events if event.kind != CLOCK])
    names = sorted(lanes, key=_place)
    made: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": title}},
        {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
    ]
    for number, name in enumerate(names):
        place = {"pid": rank, "tid": number}
        made.append({"name": "thread_name", "ph": "M", **place, "args": {"name": name}})
        made += [
            {
                "name": event.name,
                "cat": event.kind,
                "ph": "X",
                **place,
                "ts": event.start - zero,
                "dur": event.length,
            }
            for event in lanes[name]
        ]
    return made


def _place(lane: str) -> tuple[int, str]:
    """Where a lane stands among those of its rank."""
    order = (_STEP, _OPERATORS, _DEVICE, _CALLS, _NETWORK)
    return next(at for at, row in enumerate(order) if lane.startswith(row)), lane


def _lanes(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Rows in which what is on its way at a time stands side by side."""
    lanes: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda one: (one.start, -one.length)):
        name, number = event.row, 1
        if event.row == _NETWORK:
            while _end(lanes.get(f"{name} {number}")) > event.start:
                number += 1
            name = f"{name} {number}"
        lanes.setdefault(name, []).append(event)
    return lanes


def _end(lane: Sequence[Event] | None) -> float:
    return lane[-1].start + lane[-1].length if lane else float("-inf")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProgramError(f"cannot write the profile to {path}", why=str(error)) from error

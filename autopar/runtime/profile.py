"""Records a step of all ranks as a timeline for ui.perfetto.dev.

torch's profiler records the step on every rank. Of its events, the timeline keeps the parts of the
step (step_parts.py), the outermost operators, calls of collectives, messages, and kernels of
accelerators. The first rank writes all ranks into one file, with a process row for each, in the
form of simulated traces.
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
    """An event on one rank.

    Attributes:
        row: row of the timeline.
        kind: category.
        name: shown in the timeline.
        start, length: microseconds of the rank's own clock.
    """

    row: str
    kind: str
    name: str
    start: float
    length: float


@contextmanager
def profiled(path: str | Path | None, settle: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Returns a context that profiles a step and writes it to `path`; does nothing without a path.

    All ranks enter it with the same path; the first one writes.

    Args:
        path: path of the file.
        settle: waits for calls in flight between two steps, whose threads must not run while a
            profiler starts or stops.

    Raises:
        ProgramError: the file cannot be written; raised on every rank.
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
        with part(CLOCK, ""):  # at about the same moment on all ranks
            pass
        yield
        settle()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    ranks = _gathered((socket.gethostname(), _events(_raw(recording))))
    from_first_rank(lambda: _write(Path(path), merged(ranks)))


def _raw(recording: torch_profile) -> list[dict[str, Any]]:
    """Returns the profiler's events in Chrome's format."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recording.export_chrome_trace(str(file))
        # Names of kernels may contain bytes that are not text.
        trace = json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False)
    events: list[dict[str, Any]] = trace["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _events(raw: Sequence[dict[str, Any]]) -> list[Event]:
    """Returns the events of a rank that the timeline shows."""
    events: list[Event] = []
    operators: list[tuple[str, Any, float, float, str]] = []
    for event in raw:
        name, category = str(event["name"]), event.get("cat", "")
        span = (float(event["ts"]), float(event["dur"]))
        named = read_part(name) if category == "user_annotation" else None
        if named is not None:
            events.append(Event(_STEP, *named, *span))
        elif name.startswith(("gloo:", "nccl:")) and category != "gpu_user_annotation":
            events.append(Event(_NETWORK, "communication", name, *span))
        elif category in _KERNELS:
            events.append(Event(f"{_DEVICE} {event['tid']}", category, name, *span))
        elif category == "cpu_op":
            operators.append((_OPERATORS, event["tid"], *span, name))
            if "c10d" in name:  # a collective inside another operator
                operators.append((_CALLS, event["tid"], *span, name))
    ends: dict[tuple[str, Any], float] = {}
    for row, thread, start, length, name in sorted(operators, key=lambda one: (one[2], -one[3])):
        if start >= ends.get((row, thread), 0.0):
            ends[row, thread] = start + length
            events.append(Event(row, "call" if row == _CALLS else "operator", name, start, length))
    return events


def _gathered(own: tuple[str, list[Event]]) -> list[tuple[str, list[Event]]]:
    """Gathers the events of all ranks on the first one."""
    everyone = Peers.here().everyone
    return [own] if everyone is None else everyone.gather_object(own, 0)


def merged(ranks: Sequence[tuple[str, Sequence[Event]]]) -> str:
    """Returns all ranks' events as one trace, in rank order.

    The clocks of different hosts are aligned at the moment when their last ranks left the barrier
    before the step.

    Args:
        ranks: host and events of each rank.
    """
    zero: dict[str, float] = {}
    for host, events in ranks:
        left = max(event.start for event in events if event.kind == CLOCK)
        zero[host] = max(zero.get(host, left), left)
    events_: list[dict[str, Any]] = []
    for rank, (host, events) in enumerate(ranks):
        waits = [event.length for event in events if event.kind == WAIT]
        waiting = f", waits {sum(waits) / 1e6:.6f} s for others" if waits else ""
        events_ += _rows(rank, f"rank {rank} on {host}, measured{waiting}", events, zero[host])
    return json.dumps({"traceEvents": events_, "displayTimeUnit": "ms"})


def _rows(rank: int, title: str, events: Sequence[Event], zero: float) -> list[dict[str, Any]]:
    """Returns the events of one process of the trace."""
    lanes = _lanes([event for event in events if event.kind != CLOCK])
    names = sorted(lanes, key=_place)
    events_: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": title}},
        {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
    ]
    for number, name in enumerate(names):
        place = {"pid": rank, "tid": number}
        events_.append({"name": "thread_name", "ph": "M", **place, "args": {"name": name}})
        events_ += [
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
    return events_


def _place(lane: str) -> tuple[int, str]:
    """Returns the sort key of a lane among those of its rank."""
    order = (_STEP, _OPERATORS, _DEVICE, _CALLS, _NETWORK)
    return next(at for at, row in enumerate(order) if lane.startswith(row)), lane


def _lanes(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Distributes events over lanes, so that concurrent messages are next to each other."""
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

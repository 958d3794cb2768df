"""Timeline: when the tasks of a simulated step run, and the memory that they take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.cost.host_copies import HostCopy
from autopar.errors import SimulationError
from autopar.ir.collective import Collective
from autopar.simulate.task import COMPUTE, HOST, Task


@dataclass(frozen=True)
class Span:
    """A task in time.

    Attributes:
        task: the task.
        start, end: seconds from the beginning of the step.
        exposed: seconds of a collective, or of a copy to or from the host, in which nothing
            computes; several at once share them.
    """

    task: Task
    start: float
    end: float
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


def covered(spans: Iterable[Span]) -> float:
    """Returns the seconds in which at least one task of some spans runs."""
    seconds = until = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        seconds += max(span.end - max(span.start, until), 0.0)
        until = max(until, span.end)
    return seconds


@dataclass(frozen=True)
class Usage:
    """Memory over a step.

    Attributes:
        curve: (seconds, bytes) after every change.
        peak: largest number of bytes.
        time: seconds at which the peak is first reached.
        task: name of the task that begins then.
        buffers: (name, bytes) of what is alive then, the largest first.
    """

    curve: tuple[tuple[float, float], ...]
    peak: float
    time: float
    task: str
    buffers: tuple[tuple[str, float], ...]

    def reserved(self, fragmentation: float) -> float:
        """Returns the bytes that an allocator reserves if a fraction of them is fragmented."""
        return self.peak / (1 - fragmentation)

    @cached_property
    def kinds(self) -> dict[str, float]:
        """Bytes at the peak by kind of buffer, the largest first."""
        by_kind: dict[str, float] = {}
        for name, nbytes in self.buffers:
            kind = name.partition(" ")[0]
            by_kind[kind] = by_kind.get(kind, 0.0) + nbytes
        return dict(sorted(by_kind.items(), key=lambda item: -item[1]))


class Memory:
    """Adds up buffers as tasks begin and end."""

    def __init__(self) -> None:
        self.alive: dict[str, float] = {}
        self.total = 0.0
        self.curve: list[tuple[float, float]] = []
        self.log: list[tuple[Task, bool]] = []
        self.peak, self.time, self.task, self.place = 0.0, 0.0, "", 0

    def add(self, time: float, position: int, task: Task) -> None:
        """Adds the allocations of a task that begins."""
        self.log.append((task, True))
        for name, nbytes in task.allocates:
            if name in self.alive:
                raise SimulationError(
                    f"buffer {name!r} is allocated twice", where=f"task {task.name!r}"
                )
            self.alive[name] = nbytes
            self.total += nbytes
        if task.allocates:
            self.curve.append((time, self.total))
        if self.total > self.peak:
            self.peak, self.time, self.task = self.total, time, task.name
            self.place = len(self.log)

    def remove(self, time: float, task: Task) -> None:
        """Removes the buffers of a task that ends."""
        self.log.append((task, False))
        for name in task.frees:
            if name not in self.alive:
                raise SimulationError(
                    f"buffer {name!r} is freed but not allocated", where=f"task {task.name!r}"
                )
            self.total -= self.alive.pop(name)
        if task.frees:
            self.curve.append((time, self.total))

    def finish(self) -> Usage:
        """Returns the memory of the whole step."""
        alive: dict[str, float] = {}
        for task, began in self.log[: self.place]:
            if began:
                alive.update(task.allocates)
            else:
                for name in task.frees:
                    del alive[name]
        largest = sorted(alive.items(), key=lambda item: -item[1])
        return Usage(tuple(self.curve), self.peak, self.time, self.task, tuple(largest))


@dataclass(frozen=True)
class Timeline:
    """A simulated step of one device.

    Attributes:
        spans: every task in time, in program order.
        seconds: duration of the whole step.
        memory: bytes over time.
    """

    spans: tuple[Span, ...]
    seconds: float
    memory: Usage

    @cached_property
    def computing(self) -> float:
        """Seconds in which something computes."""
        return sum(span.seconds for span in self.spans if span.task.stream == COMPUTE)

    @property
    def utilisation(self) -> float:
        """Fraction of the step in which something computes."""
        return self.computing / self.seconds if self.seconds else 0.0

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, from the end of the previous one to its own end."""
        ends: dict[str, float] = {}
        for span in self.spans:
            ends[span.task.phase] = max(ends.get(span.task.phase, 0.0), span.end)
        durations, before = {}, 0.0
        for phase, end in ends.items():
            durations[phase], before = max(end - before, 0.0), max(end, before)
        return durations

    def communication(self, by: Callable[[Task], str]) -> dict[str, tuple[float, float]]:
        """Groups the time of collectives.

        Args:
            by: returns the group of a task, such as `kind_of`, `axes_of` or `cause_of`.

        Returns:
            Group -> (seconds, seconds in which nothing computes), the most exposed first.
        """
        groups: dict[str, tuple[float, float]] = {}
        for span in self.spans:
            if isinstance(span.task.what, Collective):
                key = by(span.task)
                seconds, exposed = groups.get(key, (0.0, 0.0))
                groups[key] = (seconds + span.seconds, exposed + span.exposed)
        return dict(sorted(groups.items(), key=lambda item: -item[1][1]))

    @cached_property
    def exposed(self) -> float:
        """Seconds in which something communicates and nothing computes."""
        return sum(span.exposed for span in self.spans)

    @cached_property
    def copies(self) -> tuple[float, float]:
        """Seconds of copies to and from the host, and the part in which nothing computes."""
        copies = [span for span in self.spans if isinstance(span.task.what, HostCopy)]
        return sum(span.seconds for span in copies), sum(span.exposed for span in copies)

    @cached_property
    def products(self) -> dict[str, float]:
        """FLOPs of matrix products on this device, by dtype."""
        by_dtype: dict[str, float] = {}
        for span in self.spans:
            for work in span.task.what if isinstance(span.task.what, tuple) else ():
                if work.gemm is not None:
                    flops = span.task.share * work.share * work.flops
                    by_dtype[work.dtype] = by_dtype.get(work.dtype, 0.0) + flops
        return by_dtype

    def flops_utilisation(self, flops: float, peak: float) -> float:
        """Returns the fraction of the peak that `flops` in a step amount to.

        With the model's FLOPs divided by the number of devices, this is the model FLOPs utilisation
        (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B). With the FLOPs that the device
        runs (`products`), including recomputation, it is the hardware FLOPs utilisation.

        Args:
            flops: FLOPs of one device in a step.
            peak: FLOP/s of a device.
        """
        return flops / (peak * self.seconds) if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the figures of the step in seconds and bytes, without spans."""
        views = {"kind": kind_of, "axes": axes_of, "cause": cause_of}
        return {
            "simulated": True,
            "step_seconds": self.seconds,
            "phases": self.phases,
            "compute_seconds": self.computing,
            "utilisation": self.utilisation,
            "exposed_seconds": self.exposed,
            "host_seconds": self.copies[0],
            "exposed_host_seconds": self.copies[1],
            "communication": {
                name: {
                    key: {"seconds": seconds, "exposed_seconds": exposed}
                    for key, (seconds, exposed) in self.communication(by).items()
                }
                for name, by in views.items()
            },
            "peak_bytes": self.memory.peak,
            "peak_at_seconds": self.memory.time,
            "peak_at_task": self.memory.task,
            "memory_by_kind": self.memory.kinds,
            "largest_buffers": dict(self.memory.buffers[:20]),
        }

    def to_trace(self) -> str:
        """Returns the step as a Chrome trace for ui.perfetto.dev."""
        streams = list(dict.fromkeys(span.task.stream for span in self.spans))
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "simulated device"}}
        ]
        for number, stream in enumerate(streams):
            title = stream if stream in (COMPUTE, *HOST) else f"network: {stream}"
            events.append(_event("thread_name", "M", number, args={"name": title}))
        for span in self.spans:
            if span.seconds:
                number = streams.index(span.task.stream)
                events.append(
                    _event(
                        span.task.name,
                        "X",
                        number,
                        ts=span.start * 1e6,
                        dur=span.seconds * 1e6,
                        cat=span.task.cause or span.task.phase,
                        args={"phase": span.task.phase, "node": span.task.node},
                    )
                )
        for time, nbytes in _largest_at_each(self.memory.curve):
            events.append(_event("memory", "C", 0, ts=time * 1e6, args={"bytes": nbytes}))
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def kind_of(task: Task) -> str:
    """Returns the kind of a collective, "" for a kernel."""
    return task.what.kind if isinstance(task.what, Collective) else ""


def axes_of(task: Task) -> str:
    """Returns the mesh axes of a collective."""
    return task.stream


def cause_of(task: Task) -> str:
    """Returns the cause of a collective."""
    return task.cause


def _event(name: str, phase: str, thread: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": 0, "tid": thread, **more}


def _largest_at_each(curve: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Returns the most bytes at each point in time, so that short peaks are visible."""
    most: dict[float, float] = {}
    for time, nbytes in curve:
        most[time] = max(most.get(time, 0.0), nbytes)
    return most.items()

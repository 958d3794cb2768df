"""Timeline: when all of a simulated step runs, what it waits for, and the memory it takes."""

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
        task: what ran.
        start, end: seconds from the beginning of the step.
        exposed: seconds of a collective, or of a copy to or from the host, in which nothing was
            computed; several at once share them.
    """

    task: Task
    start: float
    end: float
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass(frozen=True)
class Usage:
    """Memory over a step.

    Attributes:
        curve: (seconds, bytes) after every change.
        peak: most bytes at a time.
        time: when that is first so.
        task: the name of the task that begins then.
        buffers: what is alive then, the largest first.
    """

    curve: tuple[tuple[float, float], ...]
    peak: float
    time: float
    task: str
    buffers: tuple[tuple[str, float], ...]

    def reserved(self, fragmentation: float) -> float:
        """Bytes that an allocator takes from the device if that part of them lies idle."""
        return self.peak / (1 - fragmentation)

    @cached_property
    def kinds(self) -> dict[str, float]:
        """Bytes at the peak by kind of buffer, the largest first."""
        found: dict[str, float] = {}
        for name, nbytes in self.buffers:
            kind = name.partition(" ")[0]
            found[kind] = found.get(kind, 0.0) + nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))


class Memory:
    """Adds up buffers as tasks begin and end."""

    def __init__(self) -> None:
        self.alive: dict[str, float] = {}
        self.total = 0.0
        self.curve: list[tuple[float, float]] = []
        self.log: list[tuple[Task, bool]] = []
        self.peak, self.time, self.task, self.place = 0.0, 0.0, "", 0

    def add(self, time: float, position: int, task: Task) -> None:
        """A task begins."""
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
        """A task ends."""
        self.log.append((task, False))
        for name in task.frees:
            if name not in self.alive:
                raise SimulationError(
                    f"buffer {name!r} is freed but not there", where=f"task {task.name!r}"
                )
            self.total -= self.alive.pop(name)
        if task.frees:
            self.curve.append((time, self.total))

    def finish(self) -> Usage:
        """The whole step's."""
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
        seconds: of the whole step.
        memory: bytes over time.
    """

    spans: tuple[Span, ...]
    seconds: float
    memory: Usage

    @cached_property
    def computing(self) -> float:
        """Seconds in which something is computed."""
        return sum(span.seconds for span in self.spans if span.task.stream == COMPUTE)

    @property
    def utilisation(self) -> float:
        """The part of the step in which something is computed."""
        return self.computing / self.seconds if self.seconds else 0.0

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds from the end of one phase to that of the next."""
        ends: dict[str, float] = {}
        for span in self.spans:
            ends[span.task.phase] = max(ends.get(span.task.phase, 0.0), span.end)
        found, before = {}, 0.0
        for phase, end in ends.items():
            found[phase], before = max(end - before, 0.0), max(end, before)
        return found

    def communication(self, by: Callable[[Task], str]) -> dict[str, tuple[float, float]]:
        """Seconds that collectives take and those in which nothing is computed, by what `by` says.

        `kind_of`, `axes_of` and `cause_of` are such functions.
        """
        found: dict[str, tuple[float, float]] = {}
        for span in self.spans:
            if isinstance(span.task.what, Collective):
                key = by(span.task)
                seconds, exposed = found.get(key, (0.0, 0.0))
                found[key] = (seconds + span.seconds, exposed + span.exposed)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    @cached_property
    def exposed(self) -> float:
        """Seconds in which something is sent and nothing computed."""
        return sum(span.exposed for span in self.spans)

    @cached_property
    def copies(self) -> tuple[float, float]:
        """Seconds that copies to and from the host take, and those in which nothing is computed."""
        found = [span for span in self.spans if isinstance(span.task.what, HostCopy)]
        return sum(span.seconds for span in found), sum(span.exposed for span in found)

    @cached_property
    def products(self) -> dict[str, float]:
        """FLOPs of matrix products by dtype, as they run on this device."""
        found: dict[str, float] = {}
        for span in self.spans:
            for work in span.task.what if isinstance(span.task.what, tuple) else ():
                if work.gemm is not None:
                    flops = span.task.share * work.flops
                    found[work.dtype] = found.get(work.dtype, 0.0) + flops
        return found

    def flops_utilisation(self, flops: float, peak: float) -> float:
        """`flops` a step as a part of what a device does at `peak` FLOP/s.

        With the FLOPs of the model, divided by the number of devices, this is the model FLOPs
        utilisation (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B), with those that the
        device runs (`products`), whatever is computed twice among them, the hardware FLOPs
        utilisation.
        """
        return flops / (peak * self.seconds) if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Figures of the step as plain values, in seconds and bytes; not every span."""
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
        """The step in Chrome's trace format, for ui.perfetto.dev: a row a stream, and memory."""
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
        for time, nbytes in _last_at_each(self.memory.curve):
            events.append(_event("memory", "C", 0, ts=time * 1e6, args={"bytes": nbytes}))
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def kind_of(task: Task) -> str:
    """The kind of a collective, "" for a kernel."""
    return task.what.kind if isinstance(task.what, Collective) else ""


def axes_of(task: Task) -> str:
    """The mesh axes of a collective."""
    return task.stream


def cause_of(task: Task) -> str:
    """Why a collective is made."""
    return task.cause


def _event(name: str, phase: str, thread: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": 0, "tid": thread, **more}


def _last_at_each(curve: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """The most bytes at each point in time, so that short peaks are seen."""
    most: dict[float, float] = {}
    for time, nbytes in curve:
        most[time] = max(most.get(time, 0.0), nbytes)
    return most.items()

"""Timeline of a simulated pipeline: start and end times, idle time and kept activations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir.action import ALL, UPDATE, Action, Row

Floats = NDArray[np.float64]


class Span(NamedTuple):
    """One action with its start and end, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """One predicted training step of a pipeline over time; nothing here is measured.

    Attributes:
        rows: the actions that occupy a rank: computation, and updates that take time.
        starts: start times in seconds, one array per rank.
        ends: end times in seconds, one array per rank.
        peak_activations: for each rank, the peak number of activations kept, each of one stage and
            one microbatch.
        peak_bytes: for each rank, the peak bytes of activations.
        sends: computes the transfers between ranks, see `transfers`.
    """

    rows: tuple[Row, ...]
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    sends: Callable[[], tuple[Span, ...]] = field(default=tuple, repr=False)

    @cached_property
    def transfers(self) -> tuple[Span, ...]:
        """Sends that take time, with the sending rank and the time on the link."""
        return self.sends()

    @cached_property
    def seconds(self) -> float:
        """Seconds of the whole step, until the last rank finishes."""
        return max((float(end[-1]) for end in self.ends if len(end)), default=0.0)

    @cached_property
    def _working(self) -> list[tuple[Floats, Floats]]:
        """Starts and ends per rank, without the update that ends a flushed step."""
        ends = [sum(a.kind == UPDATE and a.microbatch == ALL for a in row) for row in self.rows]
        return [
            (start[: len(start) - own], end[: len(end) - own])
            for start, end, own in zip(self.starts, self.ends, ends, strict=True)
        ]

    @cached_property
    def computed(self) -> float:
        """Seconds until the last rank finishes, without the update that ends a flushed step."""
        return max((float(end[-1]) for _, end in self._working if len(end)), default=0.0)

    @cached_property
    def period(self) -> float:
        """Longest time between the first and last action of a rank, in seconds.

        This is the step time if the next step starts on a rank before others have finished.
        """
        spans = self._working
        return max((float(end[-1] - start[0]) for start, end in spans if len(end)), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes, or updates before the end of a step."""
        return tuple(float((end - start).sum()) for start, end in self._working)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Idle fraction of each rank, relative to `computed`."""
        return tuple(1 - busy / self.computed if self.computed else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Mean idle fraction of all ranks, relative to `computed`."""
        return max(0.0, sum(self.idle) / len(self.idle))  # sums of seconds are subject to rounding

    @property
    def joined_bubble(self) -> float:
        """Mean idle fraction relative to `period`: the `bubble` without a barrier at the end.

        Publications on zero-bubble schedules report this figure (arXiv:2401.10241, section 5).
        """
        return 1 - sum(self.busy) / (len(self.busy) * self.period) if self.period else 0.0

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """The actions of each rank with their times."""
        return tuple(
            tuple(map(Span, (rank,) * len(row), row, starts.tolist(), ends.tolist()))
            for rank, (row, starts, ends) in enumerate(
                zip(self.rows, self.starts, self.ends, strict=True)
            )
        )

    def to_trace(self) -> str:
        """Returns the step in Chrome's trace format, for ui.perfetto.dev: one line per rank."""
        events: list[dict[str, object]] = []
        for rank, row in enumerate(self.spans):
            place: dict[str, object] = {"pid": 0, "tid": rank}
            events.append(
                {"name": "thread_name", "ph": "M", **place, "args": {"name": f"rank {rank}"}}
            )
            for span in row:
                time = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
                events.append({"name": str(span.action), "ph": "X", **place, **time})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

"""Timeline: when all of a simulated pipeline runs, how long ranks are idle, and what they keep."""

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
    """One action in time, in seconds from the beginning of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """One training step of a pipeline in time; nothing here is measured.

    Attributes:
        rows: the actions that take a rank's time: those that compute, and updates where they
            take any.
        starts: seconds at which they begin, an array for each rank.
        ends: seconds at which they end.
        peak_activations: for each rank, how many activations of one stage and microbatch it keeps
            at the peak.
        peak_bytes: for each rank, the most bytes of activations that it keeps at a time.
        sends: gives what travels between ranks, see `transfers`.
    """

    rows: tuple[Row, ...]
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    sends: Callable[[], tuple[Span, ...]] = field(default=tuple, repr=False)

    @cached_property
    def transfers(self) -> tuple[Span, ...]:
        """Sends that take time, with the rank that sends and the time on their link."""
        return self.sends()

    @cached_property
    def seconds(self) -> float:
        """Of the whole step, until the last rank is done."""
        return max((float(end[-1]) for end in self.ends if len(end)), default=0.0)

    @cached_property
    def _working(self) -> list[tuple[Floats, Floats]]:
        """Starts and ends of each rank without the update that ends a flushed step."""
        ends = [sum(a.kind == UPDATE and a.microbatch == ALL for a in row) for row in self.rows]
        return [
            (start[: len(start) - own], end[: len(end) - own])
            for start, end, own in zip(self.starts, self.ends, ends, strict=True)
        ]

    @cached_property
    def computed(self) -> float:
        """Seconds until the last rank is done, but for the update that ends a flushed step."""
        return max((float(end[-1]) for _, end in self._working if len(end)), default=0.0)

    @cached_property
    def period(self) -> float:
        """Seconds between the first and the last action of the rank where that is longest.

        It is the time of a step where the next step begins on a rank before others have ended.
        """
        spans = self._working
        return max((float(end[-1] - start[0]) for start, end in spans if len(end)), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computes, or updates before the end of a step."""
        return tuple(float((end - start).sum()) for start, end in self._working)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Which part of `computed` each rank is idle."""
        return tuple(1 - busy / self.computed if self.computed else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Returns the part of `computed` in which ranks are idle, on average."""
        return max(0.0, sum(self.idle) / len(self.idle))  # sums of seconds are rounded

    @property
    def joined_bubble(self) -> float:
        """Which part of `period` ranks are idle, on average: `bubble` without a barrier at the end.

        It is what publications on zero bubbles give (arXiv:2401.10241, section 5).
        """
        return 1 - sum(self.busy) / (len(self.busy) * self.period) if self.period else 0.0

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """The actions of each rank in time."""
        return tuple(
            tuple(map(Span, (rank,) * len(row), row, starts.tolist(), ends.tolist()))
            for rank, (row, starts, ends) in enumerate(
                zip(self.rows, self.starts, self.ends, strict=True)
            )
        )

    def to_trace(self) -> str:
        """Returns the step in Chrome's trace format, for ui.perfetto.dev: a line for each rank."""
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

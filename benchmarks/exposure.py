"""Exposed communication of a profiled step: the time in which nothing computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spans = list[tuple[float, float]]


def exposed(file: Path) -> float:
    """Seconds of the first process in which something was sent and nothing computed."""
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    mine = [e for e in events if e["ph"] == "X" and e["pid"] == 0]

    def spans(wanted: Callable[[dict[str, Any]], bool]) -> Spans:
        return union([(e["ts"], e["ts"] + e["dur"]) for e in mine if wanted(e)])

    def nccl(event: dict[str, Any]) -> bool:
        return bool(event["cat"] == "kernel" and "nccl" in event["name"].lower())

    on_device = any(event["cat"] == "kernel" for event in mine)
    if on_device:
        sent = spans(nccl)
        busy = spans(lambda e: e["cat"] == "kernel" and not nccl(e))
    else:
        sent = spans(lambda e: e["cat"] == "communication")
        waits = spans(lambda e: e["cat"] == "call")
        busy = without(spans(lambda e: e["cat"] == "operator"), waits)
    return sum(end - start for start, end in without(sent, busy)) * 1e-6


def union(spans: Spans) -> Spans:
    """Returns the spans in order, with adjacent spans merged."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(spans: Spans, holes: Spans) -> Spans:
    """Returns the part of one union of spans that is outside another."""
    found = []
    for start, end in spans:
        at = start
        for begin, stop in holes:
            if stop <= at or begin >= end:
                continue
            if begin > at:
                found.append((at, begin))
            at = max(at, stop)
        if at < end:
            found.append((at, end))
    return found

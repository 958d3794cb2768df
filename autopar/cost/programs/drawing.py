"""Draws the messages of a collective program over time, as an SVG picture or a Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from xml.sax.saxutils import escape

from autopar.cost.programs.collective_program import CollectiveProgram, Message
from autopar.cost.programs.message_simulation import MessageTimes

WIDTH, ROW, LEFT, TOP = 900, 22, 60, 30
SENT, ADDED = "#06c", "#c60"  # chunks that overwrite, and chunks that are added


def _lanes(program: CollectiveProgram, times: MessageTimes) -> Iterator[tuple[int, int, Message]]:
    """Yields (number, lane, message); a rank has a lane for each concurrent message."""
    free: dict[int, list[float]] = {}
    order = sorted(range(len(times.begins)), key=lambda n: (times.begins[n], n))
    messages = list(program.messages)
    for number in order:
        lanes = free.setdefault(messages[number].source, [])
        begin = float(times.begins[number])
        lane = next((n for n, end in enumerate(lanes) if end <= begin), len(lanes))
        lanes[lane : lane + 1] = [float(times.ends[number])]
        yield number, lane, messages[number]


def perfetto(program: CollectiveProgram, times: MessageTimes) -> str:
    """Returns a trace in the JSON of Chrome and Perfetto: one process per rank, in microseconds."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for rank in range(program.ranks)
    ]
    for number, lane, message in _lanes(program, times):
        begin, end = float(times.begins[number]), float(times.ends[number])
        events.append(
            {
                "ph": "X",
                "pid": message.source,
                "tid": lane,
                "ts": 1e6 * begin,
                "dur": 1e6 * (end - begin),
                "name": f"to {message.target}",
                "cat": "add" if message.adds else "keep",
                "args": {"message": str(message)},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def picture(program: CollectiveProgram, times: MessageTimes) -> str:
    """Returns an SVG picture: a row for each rank, a bar for the duration of each message."""
    found = list(_lanes(program, times))
    depth = [1] * program.ranks
    for _, lane, message in found:
        depth[message.source] = max(depth[message.source], lane + 1)
    tops = [TOP + ROW * sum(depth[:rank]) for rank in range(program.ranks)]
    scale = (WIDTH - LEFT - 10) / (times.seconds or 1.0)
    rows = [
        f'<text x="4" y="{top + 15}">rank {rank}</text>'
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{top}" y2="{top}" stroke="#ddd"/>'
        for rank, top in enumerate(tops)
    ]
    for number, lane, message in found:
        x = LEFT + scale * float(times.begins[number])
        width = max(scale * float(times.ends[number] - times.begins[number]), 0.5)
        y = tops[message.source] + ROW * lane
        label = f"&#8594;{message.target}" if width > 24 else ""
        rows.append(
            f'<g><title>{escape(str(message))}</title><rect x="{x:.1f}" y="{y + 2}" '
            f'width="{width:.1f}" height="{ROW - 4}" fill="{ADDED if message.adds else SENT}"/>'
            f'<text x="{x + 3:.1f}" y="{y + 15}" fill="#fff">{label}</text></g>'
        )
    head = f"{program.kind} by {program.name}, {1e3 * times.seconds:.3f} ms; added: orange"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{TOP + ROW * sum(depth) + 8}" font-family="sans-serif" font-size="12">'
        f'<text x="4" y="18">{escape(head)}</text>{"".join(rows)}</svg>\n'
    )

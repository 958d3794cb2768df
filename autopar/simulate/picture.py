"""Renders a timeline with rich: figures, tables, a picture of streams, and memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_bytes, format_seconds
from autopar.simulate.task import COMPUTE
from autopar.simulate.timeline import Timeline, axes_of, cause_of, kind_of

COLUMNS = 80
_LEVELS = " ▁▂▃▄▅▆▇█"
_STYLES = {"forward": "green", "backward": "blue", "optimizer": "yellow"}
_KINDS = {
    "parameter": "parameters and buffers",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "activation": "saved activations",
    "temporary": "temporaries",
    "communication": "staging of collectives",
    "batch": "the batch",
}


def render(timeline: Timeline, *, figures: Mapping[str, str], limit: float) -> RenderableType:
    """Renders a timeline.

    Args:
        timeline: the timeline to show.
        figures: additional lines of the head, such as utilisations, by name.
        limit: memory of the device in bytes.

    Returns:
        A rich renderable.
    """
    parts = [
        _head(timeline, figures, limit),
        _time(timeline),
        *(_communication(timeline) if timeline.communication(kind_of) else ()),
        _memory(timeline),
        _picture(timeline),
    ]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _head(timeline: Timeline, figures: Mapping[str, str], limit: float) -> RenderableType:
    peak = timeline.memory.peak
    rows = {
        "step": format_seconds(timeline.seconds),
        "computing": f"{format_seconds(timeline.computing)} ({timeline.utilisation:.1%})",
        "exposed communication": f"{format_seconds(timeline.exposed)} "
        f"({timeline.exposed / (timeline.seconds or 1):.1%})",
        **figures,
        "memory at the peak": f"{format_bytes(peak)} of {format_bytes(limit)} ({peak / limit:.1%})",
    }
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(name, text)
    return Group(Text("Simulated, not measured", style="bold"), table)


def _time(timeline: Timeline) -> RenderableType:
    table = _table("Where the time goes", ("", "time", "of the step"))
    for phase, seconds in timeline.phases.items():
        table.add_row(phase, format_seconds(seconds), f"{seconds / (timeline.seconds or 1):.1%}")
    return table


def _communication(timeline: Timeline) -> Iterable[RenderableType]:
    """Yields tables by kind of collective, by mesh axes and by cause."""
    views = {"collective": kind_of, "mesh axes": axes_of, "cause": cause_of}
    for title, by in views.items():
        columns = (title, "time", "exposed", "of the step")
        table = _table(f"Communication by {title}", columns)
        for key, (seconds, exposed) in timeline.communication(by).items():
            part = f"{exposed / (timeline.seconds or 1):.1%}"
            table.add_row(key, format_seconds(seconds), format_seconds(exposed), part)
        yield table


def _memory(timeline: Timeline) -> RenderableType:
    usage = timeline.memory
    when = f"at {format_seconds(usage.time)}, as {usage.task} begins"
    table = _table(f"Memory at the peak, {when}", ("", "bytes", "of the peak"))
    for kind, nbytes in usage.kinds.items():
        part = f"{nbytes / (usage.peak or 1):.1%}"
        table.add_row(_KINDS.get(kind, kind), format_bytes(nbytes), part)
    largest = _table("The largest buffers then", ("", "bytes"))
    for name, nbytes in usage.buffers[:8]:
        largest.add_row(name, format_bytes(nbytes))
    return Group(table, Text(), largest)


def _picture(timeline: Timeline) -> RenderableType:
    """Draws how busy each stream is in each part of the step, and the peak memory in it."""
    table = Table.grid(padding=(0, 1))
    if not timeline.seconds:
        return table
    width = timeline.seconds / COLUMNS
    for stream in dict.fromkeys(span.task.stream for span in timeline.spans):
        busy, phases = [0.0] * COLUMNS, [""] * COLUMNS
        for span in timeline.spans:
            if span.task.stream == stream and span.seconds:
                for column, part in _columns(span.start, span.end, width):
                    busy[column] += part / width
                    phases[column] = span.task.phase
        row = Text()
        for level, phase in zip(busy, phases, strict=True):
            row.append(_bar(level), style=_STYLES.get(phase, ""))
        table.add_row(stream if stream == COMPUTE else f"network {stream}", row)
    most = _most(timeline.memory.curve, width)
    peak = timeline.memory.peak or 1.0
    table.add_row("memory", Text("".join(_bar(value / peak) for value in most), style="magenta"))
    table.add_row("", Text(f"0{format_seconds(timeline.seconds):>{COLUMNS - 1}}", style="dim"))
    legend = Text()
    for phase, style in _STYLES.items():
        legend.append(f"{phase} ", style=style)
    table.add_row("", legend)
    return table


def _columns(start: float, end: float, width: float) -> Iterable[tuple[int, float]]:
    """Yields the columns that an interval overlaps, with the seconds in each."""
    first = min(int(start / width), COLUMNS - 1)
    last = min(int(end / width), COLUMNS - 1)
    for column in range(first, last + 1):
        part = min(end, (column + 1) * width) - max(start, column * width)
        if part > 0:
            yield column, part


def _most(curve: Sequence[tuple[float, float]], width: float) -> list[float]:
    """Returns the peak bytes in each column, including bytes alive at the start of the column."""
    most, now, before = [0.0] * COLUMNS, 0.0, 0
    for time, nbytes in curve:
        column = min(int(time / width), COLUMNS - 1)
        for passed in range(before, column + 1):
            most[passed] = max(most[passed], now)
        most[column] = max(most[column], nbytes)
        now, before = nbytes, column
    for passed in range(before, COLUMNS):
        most[passed] = max(most[passed], now)
    return most


def _bar(level: float) -> str:
    """Returns one of nine characters; any positive level is visible."""
    if level <= 0:
        return _LEVELS[0]
    return _LEVELS[max(1, min(round(level * (len(_LEVELS) - 1)), len(_LEVELS) - 1))]


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table

"""Renders the views of an explanation as tables with bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.explain.explanation import Explanation
from autopar.explain.views import Row, view
from autopar.ir.units import format_bytes, format_seconds

BAR = 12
_TITLES = {
    "layer": ("Time by layer", "Memory by layer"),
    "op": ("Time by kind of operator", "Memory by kind of operator"),
    "collective": ("Time by kind of collective", ""),
    "axis": ("Time by mesh axis", "Memory by the mesh axes that split it"),
}
# Row titles for an empty collective or axis: (in time tables, in memory tables).
_NONE = {"collective": ("compute", ""), "axis": ("compute", "whole on every device")}


def render_view(explanation: Explanation, by: str) -> Iterator[RenderableType]:
    """Yields a view's table of time and, except for collectives, its table of memory."""
    rows, (time, memory) = view(explanation, by), _TITLES[by]
    compute, whole = _NONE.get(by, ("", ""))
    timed, holding = [r for r in rows if r.seconds], [r for r in rows if r.memory]
    causes = [cause for cause in explanation.seconds if by in ("layer", "op")]
    yield _time(time, by, timed, causes, compute)
    if memory:
        held = [cause for cause, nbytes in explanation.memory.items() if nbytes]
        yield _memory(memory, by, holding, held, whole)


def _time(title: str, by: str, rows: Sequence[Row], causes: Sequence[str], none: str) -> Table:
    """Renders the seconds of a step by cause, with the collectives' calls and bytes sent."""
    step = sum(row.time for row in rows)
    table = _table(title, by)
    for cause in causes:
        table.add_column(cause, justify="right", no_wrap=True)
    for heading in ("calls", "sent", "a step", "", ""):
        table.add_column(heading, justify="right" if heading != "" else "left", no_wrap=True)
    for row in rows:
        by_cause = (_blank(row.seconds.get(cause, 0.0), format_seconds) for cause in causes)
        traffic = (_blank(row.calls, str), _blank(row.sent, format_bytes))
        table.add_row(
            row.name or none, *by_cause, *traffic, format_seconds(row.time),
            *_share(row.time, step, "green"),
        )  # fmt: skip
    table.add_section()
    sums = (sum(row.seconds.get(cause, 0.0) for row in rows) for cause in causes)
    calls, sent = sum(row.calls for row in rows), sum(row.sent for row in rows)
    traffic = (_blank(calls, str), _blank(sent, format_bytes))
    table.add_row("sum", *map(format_seconds, sums), *traffic, format_seconds(step))
    return table


def _memory(title: str, by: str, rows: Sequence[Row], causes: Sequence[str], none: str) -> Table:
    """Renders the bytes of a device by cause: layers in order, other rows the largest first."""
    peak = sum(row.held for row in rows)
    table = _table(title, by)
    for heading in (*causes, "a device", "", ""):
        # The full heading is wider than the figures below it.
        shown = heading.replace("gathered parameters", "gathered")
        table.add_column(shown, justify="right" if heading else "left", no_wrap=True)
    for row in rows if by == "layer" else sorted(rows, key=lambda row: -row.held):
        by_cause = (_blank(row.memory.get(cause, 0.0), format_bytes) for cause in causes)
        share = _share(row.held, peak, "blue")
        table.add_row(row.name or none, *by_cause, format_bytes(row.held), *share)
    table.add_section()
    sums = (sum(row.memory.get(cause, 0.0) for row in rows) for cause in causes)
    table.add_row("sum", *map(format_bytes, sums), format_bytes(peak))
    return table


def _share(value: float, whole: float, style: str) -> tuple[Text, str]:
    """Returns a bar of the fraction `value / whole`, and that fraction in per cent."""
    part = value / whole if whole else 0.0
    return bar(value, whole, BAR, style), f"{part:.1%}"


def bar(value: float, largest: float, width: int, style: str) -> Text:
    """Returns a bar of `width` characters, filled in the proportion `value / largest`."""
    count = round(width * value / largest) if largest else 0
    return Text("█" * count + "·" * (width - count), style=style)


def _blank(value: float, text: Callable[[Any], str]) -> str:
    """Returns a figure as `text` formats it, "" for zero."""
    return text(value) if value else ""


def _table(title: str, by: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(by, overflow="fold", min_width=20)
    return table

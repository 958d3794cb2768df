"""Renders the difference of two plans as rich tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.explain.decisions import Change
from autopar.explain.difference import Difference, Figure, Traffic
from autopar.ir.units import format_bytes, format_seconds

SHOWN = 16  # rows of a long table
_NAMES = {
    "step_seconds": "time a step",
    "simulated_seconds": "time a step, simulated",
    "compute_seconds": "  compute",
    "exchange_seconds": "  communication in operators",
    "parameter_seconds": "  parameters and gradients",
    "reshard_seconds": "  resharding of activations",
    "host_seconds": "  copies to and from the host",
    "update_seconds": "  optimizer",
    "waiting_seconds": "  waiting for the host",
    "hidden_seconds": "  less what overlaps with kernels",
    "bubble": "bubble",
    "peak_bytes": "memory a device",
    "parameter_bytes": "  parameters and their state",
    "activation_bytes": "  activations",
    "host_bytes": "host memory a device",
}


def render_difference(
    compared: Difference, titles: tuple[str, str], *, everything: bool = False
) -> Iterator[RenderableType]:
    """Yields tables of all that differs: head, figures, layouts, collectives.

    Args:
        compared: the difference.
        titles: headings of the two plans' columns.
        everything: whether to show all rows of long tables.
    """
    shown = None if everything else SHOWN
    if compared.head:
        yield _pairs("", compared.head, titles, None)
    if compared.pins:
        yield _pairs("Pins", compared.pins, titles, shown)
        yield from _left_out(len(compared.pins), shown)
    yield render_figures(compared.figures, titles)
    yield from render_changes(compared.changes, titles, shown)
    totals = [total for total in compared.totals or () if total.before != total.after]
    if totals:
        yield _traffic("Collectives of a step: calls × bytes per device", totals, titles, None)
    if compared.traffic:
        yield _traffic("Collectives by parameter and module", compared.traffic, titles, shown)
        yield from _left_out(len(compared.traffic), shown)


def render_figures(figures: Sequence[Figure], titles: tuple[str, str]) -> Table:
    """Renders predicted seconds and bytes side by side, with the change from first to second."""
    table = _table("Predicted", "", *titles, "change", "")
    order = {name: place for place, name in enumerate(_NAMES)}
    for figure in sorted(figures, key=lambda figure: order.get(figure.name, len(order))):
        if not figure.before and not figure.after:
            continue
        write = _format_of(figure.name)
        sides = (write(side) for side in (figure.before, figure.after))
        table.add_row(figure_name(figure.name), *sides, *_change(figure, write))
    return table


def figure_name(name: str) -> str:
    """Returns the words for a figure of a prediction; parts of another one are indented."""
    return _NAMES.get(name, f"  {name.replace('_', ' ')}")


def _format_of(name: str) -> Callable[[float], str]:
    """Returns the function that formats a figure of this name."""
    if name == "bubble":
        return lambda fraction: f"{fraction:.1%}"
    return format_bytes if name.endswith("bytes") else format_seconds


def render_changes(
    changes: Sequence[Change], titles: tuple[str, str], shown: int | None = None
) -> Iterator[RenderableType]:
    """Yields a table of layouts that differ.

    Args:
        changes: the changes, in the order of the rows.
        titles: headings of the two plans' columns.
        shown: the number of rows to show; None shows all.
    """
    if not changes:
        return
    table = Table(title="Layouts", **_STYLE)  # type: ignore[arg-type]
    table.add_column("of", no_wrap=True, overflow="ellipsis")
    for heading in ("", *titles):
        table.add_column(heading, overflow="fold")
    for change in changes[:shown]:
        name = change.name + (f"  × {change.times}" if change.times > 1 else "")
        table.add_row(name, change.op, change.before or "none", change.after or "none")
    yield table
    yield from _left_out(len(changes), shown)


def signed(value: float, write: Callable[[float], str]) -> str:
    """Formats a figure with its sign: "+1.2 ms", "-3 MiB", "0 s"."""
    return f"+{write(value)}" if value > 0 else write(value)


def _change(figure: Figure, write: Callable[[float], str]) -> tuple[str, Text]:
    """Returns the change from the first plan to the second, absolute and in per cent."""
    change = figure.change
    if not change:
        return "", Text("")
    style = "red" if change > 0 else "green"
    part = f"{change / figure.before:+.1%}" if figure.before else ""
    return signed(change, write), Text(part, style=style)


def _pairs(
    title: str, pairs: Mapping[str, tuple[str, str]], titles: tuple[str, str], shown: int | None
) -> Table:
    table = Table(title=title, **_STYLE)  # type: ignore[arg-type]
    for heading in ("", *titles):
        table.add_column(heading, overflow="fold")
    for name, (before, after) in list(pairs.items())[:shown]:
        table.add_row(name, before or "none", after or "none")
    return table


def _traffic(
    title: str, rows: Sequence[Traffic], titles: tuple[str, str], shown: int | None
) -> Table:
    table = Table(title=title, **_STYLE)  # type: ignore[arg-type]
    named = any(row.name for row in rows)
    for heading in (*(("of",) if named else ()), "collective", "over"):
        table.add_column(heading, overflow="fold")
    for heading in (*titles, "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:shown]:
        sides = (f"{calls} × {format_bytes(sent / calls)}" if calls else "none"
                 for calls, sent in (row.before, row.after))  # fmt: skip
        more = row.after[1] - row.before[1]
        kind = f"backward {row.kind}" if row.backward else row.kind
        cells = (*((row.name,) if named else ()), kind, row.axes, *sides)
        table.add_row(*cells, signed(more, format_bytes) if more else "")
    return table


def _left_out(count: int, shown: int | None) -> Iterator[Text]:
    if shown is not None and count > shown:
        yield Text(f"and {count - shown} more; --all shows them", style="dim")


_STYLE = {"title_justify": "left", "title_style": "bold", "box": None, "pad_edge": False}


def _table(title: str, *headings: str) -> Table:
    """Returns an empty table with names at the left and figures at the right."""
    table = Table(title=title, **_STYLE)  # type: ignore[arg-type]
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table

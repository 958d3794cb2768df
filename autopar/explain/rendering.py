"""Renders an explanation with rich: bars, and tables whose totals add up to the bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.explain.explanation import CACHES, Explanation, Line, Operator
from autopar.explain.moves import Call, Move
from autopar.explain.view_tables import bar, render_view
from autopar.explain.views import VIEWS
from autopar.ir.units import format_bytes, format_seconds

PARTS = (*VIEWS, "line", "parameter")
SLOWEST = 10  # lines shown in the table of the slowest
BAR = 24


def render(
    explanation: Explanation, *, by: str | None = None, everything: bool = False
) -> RenderableType:
    """Renders the totals and the tables of an explanation.

    Args:
        explanation: the explanation to show.
        by: one of `PARTS`, to show only the totals and that table; None shows all tables.
        everything: also list operators that cost nothing.

    Returns:
        A rich renderable.
    """
    parts = [render_summary(explanation)]
    for name in VIEWS:
        if by in (None, name):
            parts += render_view(explanation, name)
    if by in (None, "line"):
        parts += [_slowest(explanation), _lines(explanation, everything)]
    if by in (None, "parameter"):
        parts.append(render_parameters(explanation, costs=True))
    if explanation.whole:
        names = ", ".join(f"%{name}" for name in explanation.whole)
        parts.append(Text(f"Replicated, because they have no rule: {names}", style="yellow"))
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def render_summary(explanation: Explanation) -> RenderableType:
    """Renders the graph and mesh, and the step time and memory by cause."""
    seconds, memory = explanation.seconds, explanation.memory
    step, held = explanation.shown, sum(memory.values())
    peak = held if explanation.peak is None else explanation.peak
    limit = f" of {format_bytes(explanation.limit)} ({peak / explanation.limit:.1%})"
    parts: list[RenderableType] = [
        Text(f"{explanation.graph} on {explanation.mesh}", style="bold"),
        Text(f"\ntime a step       {format_seconds(step)}{_range(explanation)}", style="bold"),
        _bars({name: (value, format_seconds(value)) for name, value in seconds.items()}),
        *_hidden(explanation),
        *_closed_form(explanation),
        Text(f"\nmemory a device   {format_bytes(peak)}{limit}", style="bold"),
        _bars({name: (value, format_bytes(value)) for name, value in memory.items()}),
        *_memory_over_time(held, peak, CACHES in memory),
        *_host_memory(explanation),
    ]
    if explanation.caution:
        parts.append(Text(f"\n{explanation.caution}", style="yellow"))
    if explanation.stale:
        stated = explanation.predicted
        note = (
            f"\nThe plan's file predicts {format_seconds(stated.get('step_seconds', 0.0))} and "
            f"{format_bytes(stated.get('peak_bytes', 0.0))}: its layouts were edited since, or it "
            "was planned for an optimizer other than AdamW."
        )
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _range(explanation: Explanation) -> str:
    """Returns by how much the time of a step may be off; nothing if that is unknown."""
    if not explanation.error:
        return ""
    return f" ± {format_seconds(explanation.error)} ({explanation.error / explanation.shown:.0%})"


def _memory_over_time(held: float, peak: float, generates: bool) -> list[Text]:
    """Returns a note on the difference between the peak and the sum of causes, if there is one."""
    if held == peak:
        return []
    if generates or peak > held:
        what = "temporary values" if generates else "temporary values and the allocator's reserve"
        return [Text(f"  {what} take {format_bytes(peak - held)}", style="dim")]
    note = f"  the sum is {format_bytes(held)}: activations are freed as gradients are allocated"
    return [Text(note, style="dim")]


def _host_memory(explanation: Explanation) -> list[Text]:
    """Returns a note on the bytes in host memory; nothing if there are none."""
    if not explanation.host:
        return []
    return [Text(f"  plus {format_bytes(explanation.host)} in host memory", style="dim")]


def _hidden(explanation: Explanation) -> list[Text]:
    """Returns a note on overlapped seconds, which two causes count; nothing if there are none."""
    if not explanation.hidden:
        return []
    saved = format_seconds(explanation.hidden)
    copies = " and copies to and from the host" if explanation.copies else ""
    note = f"  less {saved}: collectives{copies} overlap with kernels"
    return [Text(note, style="dim")]


def render_parameters(explanation: Explanation, *, costs: bool = False) -> RenderableType:
    """Renders a table of the layouts in which parameters are stored and used.

    Args:
        explanation: the explanation to show.
        costs: also list the seconds of gathering parameters and synchronising gradients.

    Returns:
        A rich renderable.
    """
    title = "Parameters: gathering them and synchronising their gradients"
    table = _table(title if costs else "Parameters")
    table.add_column("parameter", overflow="fold", min_width=36 if costs else None)
    table.add_column("stored", overflow="fold")
    table.add_column("used", overflow="fold")
    if costs:
        _time_columns(table)
    for parameter in explanation.parameters:
        name = parameter.name + (f"  × {parameter.times}" if parameter.times > 1 else "")
        used = "as stored" if parameter.used == parameter.stored else parameter.used
        table.add_row(name, parameter.stored, used, *([""] * (3 if costs else 0)))
        for move in parameter.moves if costs else ():
            for call, times in ((call, move.count(call)) for call in move.calls):
                table.add_row(f"  {_call(call)}", "", "", *_times(call, times))
    if costs:
        table.add_section()
        table.add_row("sum", "", "", "", "", format_seconds(explanation.seconds["parameters"]))
    return table


def _closed_form(explanation: Explanation) -> list[Text]:
    """Returns a note on the closed form of a step that was simulated; nothing if it was not."""
    if explanation.shown == explanation.step:
        return []
    closed = format_seconds(explanation.step)
    note = f"  the step is simulated; these causes are closed forms, in which it takes {closed}"
    return [Text(note, style="dim")]


def _lines(explanation: Explanation, everything: bool) -> RenderableType:
    """Renders the time of blocks, of lines of the user's code, of operators and collectives."""
    table = _table("Where the time goes")
    table.add_column("line, operator, collective", overflow="fold")
    _time_columns(table)
    hidden = 0
    for section in explanation.sections:
        title = f"{section.title}  × {section.times}" if section.title else "outside of blocks"
        table.add_row(Text(title, style="bold"), "", "", _seconds(section.seconds, "bold"))
        for line in section.lines:
            shown = [o for o in line.operators if everything or o.seconds]
            hidden += len(line.operators) - len(shown)
            if not shown:
                continue
            table.add_row(_where(line, " "), "", "", "")
            for operator in shown:
                for row in _operator(operator):
                    table.add_row(*row)
        table.add_section()
    seconds = explanation.seconds
    total = format_seconds(seconds["compute"] + seconds["activations"])
    table.add_row("sum", "", "", total)
    if not hidden:
        return table
    return Group(table, Text(f"{hidden} operators that take no time are not shown.", style="dim"))


def _operator(operator: Operator) -> Iterator[tuple[RenderableType, ...]]:
    """Yields the rows of an operator: the collectives before it, itself, those after it."""
    yield from _moves("before", (move for move in operator.before if not move.inside))
    label = Text(f"   {operator.kind}  ")
    label.append(operator.layouts, style="dim")
    yield (label, "", "", _seconds(operator.cost.compute))
    yield from _moves("inside", (move for move in operator.before if move.inside))
    yield from _moves("after", operator.after)


def _moves(when: str, moves: Iterable[Move]) -> Iterator[tuple[RenderableType, ...]]:
    for move in moves:
        for call in move.calls:
            text = Text(f"     {when}: {_call(call)}", style="magenta")
            yield (text, *_times(call, move.count(call)))


def _call(call: Call) -> str:
    return f"{call.kind} over {', '.join(call.axes)}, {format_bytes(call.nbytes)}"


def _times(call: Call, times: int) -> tuple[str, str, Text]:
    """Returns the cells of a collective: one forward call, one backward call, a whole step."""
    one = format_seconds(call.seconds)
    both = ("", one) if call.backward else (one, "")
    return (*both, _seconds(times * call.seconds))


def _slowest(explanation: Explanation) -> RenderableType:
    """Renders the slowest lines with their time and the activations that they save."""
    table = _table(f"The {SLOWEST} slowest lines")
    table.add_column("line", overflow="fold")
    for title in ("time", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
    pairs = explanation.slowest_lines
    slowest = max((line.seconds for _, line in pairs), default=0.0)
    largest = max((line.saved for _, line in pairs), default=0.0)
    for section, line in pairs[:SLOWEST]:
        table.add_row(
            _where(line, f"{section.times} × " if section.times > 1 else ""),
            format_seconds(line.seconds),
            bar(line.seconds, slowest, BAR // 2, "green"),
            format_bytes(line.saved),
            bar(line.saved, largest, BAR // 2, "blue"),
        )
    return table


def _where(line: Line, prefix: str) -> Text:
    """Returns the module, place and text of a line, truncated to the terminal's width."""
    place = " | ".join(part for part in (line.module, line.place, line.text) if part)
    text = Text(prefix + (place or "(no line)"), no_wrap=True, overflow="ellipsis")
    text.stylize("cyan", len(prefix))
    return text


def _bars(figures: Mapping[str, tuple[float, str]]) -> Table:
    """Returns a bar for each cause, as long as its fraction of the sum."""
    total = sum(value for value, _ in figures.values())
    table = Table.grid(padding=(0, 2))
    for name, (value, text) in figures.items():
        if not value:
            continue
        table.add_row(
            f"  {name:<20}", bar(value, total, BAR, "green"), text, f"{value / total:.0%}"
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)


def _time_columns(table: Table) -> None:
    for title in ("forward", "backward", "a step"):
        table.add_column(title, justify="right", no_wrap=True)


def _seconds(value: float, style: str = "") -> Text:
    return Text(format_seconds(value) if value else "", style=style)

"""An explanation as rich renderables: bars, and tables whose totals add up to the bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.explain.explanation import Explanation, Line, Operator
from autopar.explain.moves import Call, Move
from autopar.explain.tables import bar, render_view
from autopar.explain.views import VIEWS
from autopar.ir.units import format_bytes, format_seconds

PARTS = (*VIEWS, "line", "parameter")
DEAREST = 10
BAR = 24


def render(
    explanation: Explanation, *, by: str | None = None, everything: bool = False
) -> RenderableType:
    """The whole explanation, from the sums down to every line, or one part of it.

    Args:
        explanation: what is shown.
        by: one of `PARTS`, to show the sums and that part only.
        everything: list operators that cost nothing, too.
    """
    parts = [render_summary(explanation)]
    for name in VIEWS:
        if by in (None, name):
            parts += render_view(explanation, name)
    if by in (None, "line"):
        parts += [_dearest(explanation), _lines(explanation, everything)]
    if by in (None, "parameter"):
        parts.append(render_parameters(explanation, costs=True))
    if explanation.whole:
        names = ", ".join(f"%{name}" for name in explanation.whole)
        parts.append(Text(f"Whole on every device for want of a rule: {names}", style="yellow"))
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def render_summary(explanation: Explanation) -> RenderableType:
    """What it is, and its time and memory by cause."""
    seconds, memory = explanation.seconds, explanation.memory
    step, held = explanation.step, sum(memory.values())
    peak = held if explanation.peak is None else explanation.peak
    limit = f" of {format_bytes(explanation.limit)} ({peak / explanation.limit:.1%})"
    parts: list[RenderableType] = [
        Text(f"{explanation.graph} on {explanation.mesh}", style="bold"),
        Text(f"\ntime a step       {format_seconds(step)}", style="bold"),
        _bars({name: (value, format_seconds(value)) for name, value in seconds.items()}),
        *_hidden(explanation),
        Text(f"\nmemory a device   {format_bytes(peak)}{limit}", style="bold"),
        _bars({name: (value, format_bytes(value)) for name, value in memory.items()}),
        *_never_at_once(held, peak),
        *_in_host_memory(explanation),
    ]
    if explanation.caution:
        parts.append(Text(f"\n{explanation.caution}", style="yellow"))
    if explanation.stale:
        said = explanation.predicted
        note = (
            f"\nThe plan itself predicts {format_seconds(said.get('step_seconds', 0.0))} and "
            f"{format_bytes(said.get('peak_bytes', 0.0))}: its layouts were edited since, or it "
            "was made for another optimizer than AdamW."
        )
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _never_at_once(held: float, peak: float) -> list[Text]:
    """That the causes are not there at one time, where the peak is known."""
    if held == peak:
        return []
    said = f"  {format_bytes(held)} in all, not at one time: gradients come as activations go"
    return [Text(said, style="dim")]


def _in_host_memory(explanation: Explanation) -> list[Text]:
    """What lies in host memory."""
    if not explanation.host:
        return []
    said = f"  {format_bytes(explanation.host)} beside, in host memory"
    return [Text(said, style="dim")]


def _hidden(explanation: Explanation) -> list[Text]:
    """What the causes count twice."""
    if not explanation.hidden:
        return []
    saved = format_seconds(explanation.hidden)
    copies = " and copies to the host and back" if explanation.copies else ""
    said = f"  less {saved}: collectives{copies} run beside kernels"
    return [Text(said, style="dim")]


def render_parameters(explanation: Explanation, *, costs: bool = False) -> RenderableType:
    """How parameters are stored and used; with `costs` what gathers and gradients take."""
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


def _lines(explanation: Explanation, everything: bool) -> RenderableType:
    """Where the time goes: blocks, lines of the user's code, operators and their collectives."""
    table = _table("Where the time goes")
    table.add_column("line, operator, collective", overflow="fold")
    _time_columns(table)
    hidden = 0
    for section in explanation.sections:
        title = f"{section.title}  × {section.times}" if section.title else "once"
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
    return Group(table, Text(f"{hidden} operators that cost no time are left out.", style="dim"))


def _operator(operator: Operator) -> Iterator[tuple[RenderableType, ...]]:
    """Its collectives before it, itself, and those after it."""
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
    """Forward, backward, and all times of a step."""
    one = format_seconds(call.seconds)
    both = ("", one) if call.backward else (one, "")
    return (*both, _seconds(times * call.seconds))


def _dearest(explanation: Explanation) -> RenderableType:
    """The lines that take most time, with what they keep for the backward."""
    table = _table(f"The {DEAREST} dearest lines")
    table.add_column("line", overflow="fold")
    for title in ("time", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
    pairs = explanation.dearest
    slowest = max((line.seconds for _, line in pairs), default=0.0)
    largest = max((line.saved for _, line in pairs), default=0.0)
    for section, line in pairs[:DEAREST]:
        table.add_row(
            _where(line, f"{section.times} × " if section.times > 1 else ""),
            format_seconds(line.seconds),
            bar(line.seconds, slowest, BAR // 2, "green"),
            format_bytes(line.saved),
            bar(line.saved, largest, BAR // 2, "blue"),
        )
    return table


def _where(line: Line, prefix: str) -> Text:
    """Module, place and text of a line, cut where the terminal ends."""
    place = " | ".join(part for part in (line.module, line.place, line.text) if part)
    text = Text(prefix + (place or "(no line)"), no_wrap=True, overflow="ellipsis")
    text.stylize("cyan", len(prefix))
    return text


def _bars(figures: Mapping[str, tuple[float, str]]) -> Table:
    """One bar for each cause, of its part of the sum."""
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

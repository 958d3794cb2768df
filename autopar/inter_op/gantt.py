"""Renders the timeline of a pipeline as text, one line per rank."""

from __future__ import annotations

from rich.text import Text

from autopar.inter_op.pipeline_timeline import Span, Timeline
from autopar.ir.action import ALL

IDLE = "·"
_STYLES = {
    "F": "black on green",
    "B": "white on blue",
    "I": "black on cyan",
    "W": "white on magenta",
    "U": "black on yellow",
}
# Colours of a rank's later stages, and of other copies of the model.
_SECOND = {
    "F": "black on bright_green",
    "B": "black on bright_blue",
    "I": "black on bright_cyan",
    "W": "black on bright_magenta",
    "U": "black on bright_yellow",
}


def gantt(timeline: Timeline, columns: int) -> tuple[Text, ...]:
    """Returns one line per rank whose width represents the time of the step.

    An action shows its kind and, if there is room, its microbatch; "-" fills the rest of its width.
    `IDLE` marks a waiting rank. If there are fewer columns than actions, each column shows the
    action that runs in its middle.

    Args:
        timeline: the timeline to render.
        columns: maximum number of characters per line, at least one.
    """
    lengths = [span.end - span.start for row in timeline.spans for span in row]
    shortest = min((length for length in lengths if length), default=timeline.seconds)
    room = columns * shortest / timeline.seconds if timeline.seconds else 0.0
    # Whole columns for the shortest action keep equal actions equally wide.
    column = shortest / (int(room) or room or 1.0)
    count = round(timeline.seconds / column) if column else 0
    return tuple(_line(row, column, min(count, columns)) for row in timeline.spans)


def legend(timeline: Timeline) -> Text:
    """Returns the kinds of actions that occur, in their colours."""
    words = {
        "F": "forward", "B": "backward", "I": "input backward", "W": "weight backward",
        "U": "update",
    }  # fmt: skip
    there = {action.kind[0] for row in timeline.rows for action in row}
    parts = [
        part
        for kind, word in words.items()
        if kind in there
        for part in (Text(kind, _STYLES[kind]), Text(f" {word}  "))
    ]
    return Text.assemble(*parts, Text(f"{IDLE} idle"))


def _line(row: tuple[Span, ...], column: float, columns: int) -> Text:
    """Renders a row: each column shows the action in its middle, labelled at its first column."""
    line = Text()
    ahead = iter(row)
    span = next(ahead, None)
    drawn: Span | None = None
    text, style = iter(""), ""
    for number in range(columns):
        middle = (number + 0.5) * column
        while span is not None and span.end <= middle:
            span = next(ahead, None)
        if span is None or span.start > middle:
            line.append(IDLE, "dim")
            continue
        if span is not drawn:
            drawn, text, style = span, iter(_text(span, column)), _style(span, row)
        line.append(next(text, "-"), style)
    return line


def _text(span: Span, column: float) -> str:
    """Returns kind and microbatch if they fit, else the kind."""
    letter, batch = span.action.kind[0], span.action.microbatch
    text = letter if batch == ALL else f"{letter}{batch}"
    return text if round((span.end - span.start) / column) >= len(text) else letter


def _style(span: Span, row: tuple[Span, ...]) -> str:
    first = min(other.action.stage for other in row if other.action.copy == span.action.copy)
    own = span.action.copy == 0 and span.action.stage == first
    return (_STYLES if own else _SECOND)[span.action.kind[0]]

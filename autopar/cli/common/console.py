"""Printing for all commands: output, progress on stderr, errors in red."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.status import Status
from rich.table import Table

from autopar.errors import ProgramError
from autopar.files.kinds import Kind
from autopar.lower.literals import printable
from autopar.planning.trace import Trace

FILE = Kind("the file", ProgramError)
WIDTH = 120  # of lines printed to a file or a pipe


class Seconds(click.FloatRange):
    """A time in seconds, from 0 to 1e9; neither NaN nor infinity."""

    def __init__(self) -> None:
        super().__init__(min=0, max=1e9)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses a number."""
        seconds = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number", param, ctx)
        return seconds


SECONDS = Seconds()
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


class Console(rich.console.Console):
    """A console that prints untrusted text: no markup, and no control characters."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yields segments in which control characters are escaped."""
        for text, style, control in super().render(renderable, options):
            shown = text if control else "\n".join(map(printable, text.split("\n")))
            yield Segment(shown, style, control)


def say(text: str, *, fg: str | None = None, err: bool = False) -> None:
    """Prints lines that may contain untrusted text."""
    click.secho("\n".join(map(printable, text.split("\n"))), fg=fg, err=err)


class Stages(Trace):
    """A trace that also reports the progress of planning."""

    def __init__(self, folder: Path | None, stage: Callable[[str], None]) -> None:
        super().__init__(folder)
        self.stage = stage

    def tell(self, doing: str) -> None:
        """Reports what planning does now."""
        self.stage(doing)

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Writes one value; raises ProgramError if it cannot be written."""
        with writing(self.folder):
            super().__call__(name, text)


@contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows the current stage of work on stderr, if it is a terminal and `quiet` is not set."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda name: None
        return
    began = time.perf_counter()
    with Status("capture", console=console) as status:
        yield lambda name: status.update(f"{name}  ({time.perf_counter() - began:.0f} s)")


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turns an OSError of a block that writes to `path` into a ProgramError."""
    try:
        yield
    except OSError as error:
        todo = "name another file, or make room"
        raise ProgramError(f"cannot write {path}", why=str(error), todo=todo) from error


def print_out(*parts: RenderableType) -> None:
    """Prints to stdout, as wide as the terminal, or at least WIDTH to a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for part in parts:
        console.print(foldable(part))


def foldable(part: RenderableType) -> RenderableType:
    """Wraps table cells that are too wide, instead of truncating them with dots."""
    if isinstance(part, Table):
        for column in part.columns:
            column.overflow, column.no_wrap = "fold", False
    inner = part.renderables if isinstance(part, rich.console.Group) else ()
    for each in (*inner, *([part.renderable] if isinstance(part, Padding) else ())):
        foldable(each)
    return part


def print_json(value: object) -> None:
    """Prints one JSON document."""
    click.echo(json.dumps(value, indent=1))

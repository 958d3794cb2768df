"""What every command prints with: output, stages on stderr, errors in red."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.status import Status

from autopar.errors import AutoparError, ProgramError
from autopar.planning.single import Trace

WIDTH = 120  # of text that goes into a file or a pipe
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


class Group(click.Group):
    """Commands whose named errors are printed in red, with exit code 2 and no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; exit code 2 after a named error."""
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            click.secho(str(error), fg="red", err=True)
            ctx.exit(2)


class Stages(Trace):
    """A trace that also tells how far planning is."""

    def __init__(self, folder: Path | None, stage: Callable[[str], None]) -> None:
        super().__init__(folder)
        self.stage = stage

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Keep one value; ProgramError where it cannot be written."""
        if name == "problem.json":
            self.stage("solve")
        with writing(self.folder):
            super().__call__(name, text)


@contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that names the stage at work; nothing unless a person watches."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda name: None
        return
    began = time.perf_counter()
    with Status("capture", console=console) as status:
        yield lambda name: status.update(f"{name}  ({time.perf_counter() - began:.0f} s)")


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """A block that writes to `path`: what the system refuses is a ProgramError."""
    try:
        yield
    except OSError as error:
        raise ProgramError(f"cannot write {path}", why=str(error)) from error


def print_out(*parts: RenderableType) -> None:
    """Print to stdout, as wide as the terminal, or WIDTH into a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for part in parts:
        console.print(part)


def print_json(value: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=1))

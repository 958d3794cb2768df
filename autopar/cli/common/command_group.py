"""The group of commands: found in the folder, imported when used, with their errors in red."""

from __future__ import annotations

import ast
import errno
import os
import pkgutil
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click

from autopar.errors import AutoparError, ProgramError

_COMMANDS = ("click.command", "click.group")
INTERRUPTED = 130  # exit status of a program that Ctrl-C ended, as a shell gives it


class Entry(NamedTuple):
    """Place where a command is defined, and the first sentence of its help."""

    module: str
    function: str
    summary: str


class Group(click.Group):
    """A group of the commands that a package's modules define by `click.command` or `click.group`.

    The list of commands comes from the modules' text; a module is imported when its command runs.
    Prints autopar's errors in red and exits with status 2, with 130 after Ctrl-C.

    Args:
        package: name of the package.
    """

    def __init__(self, *args: Any, package: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.package = package

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Name of a command -> where it is defined."""
        return dict(_entries(self.package))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands, in order."""
        return sorted(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command; returns None if no command has this name."""
        # The module that is named like the command is read first, and usually the only one.
        known = _entries(self.package, cmd_name.replace("-", "_"))
        entry = next((entry for name, entry in known if name == cmd_name), None)
        if entry is None:
            return None
        command = getattr(import_module(entry.module), entry.function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            rows = [(name, entry.summary) for name, entry in sorted(self.entries.items())]
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; exits with status 2 after an AutoparError or a failed print."""
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            click.secho("interrupted", fg="red", err=True)
            ctx.exit(INTERRUPTED)
        except AutoparError as error:
            click.secho(str(error), fg="red", err=True)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader closed the pipe: click exits quietly
                raise
            if error.filename is not None:
                raise  # of a file that autopar does not expect to miss
            why = error.strerror or str(error)
            click.secho(str(ProgramError("cannot print", why=why)), fg="red", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # do not retry buffered output at exit
        ctx.exit(2)


def _entries(package: str, first: str = "") -> Iterator[tuple[str, Entry]]:
    """Yields the commands that the modules of a package define, starting with one module."""
    for folder in import_module(package).__path__:
        for info in sorted(pkgutil.iter_modules([folder]), key=lambda info: info.name != first):
            if info.ispkg:
                continue
            tree = ast.parse((Path(folder) / f"{info.name}.py").read_text(encoding="utf-8"))
            for function in tree.body:
                if isinstance(function, ast.FunctionDef):
                    help_text = (ast.get_docstring(function) or "").split("\n\n")[0]
                    entry = Entry(
                        f"{package}.{info.name}", function.name, " ".join(help_text.split())
                    )
                    yield from ((name, entry) for name in _named(function))


def _named(function: ast.FunctionDef) -> Iterator[str]:
    """Yields the name of the command that a function is, if it is one."""
    for each in function.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func) in _COMMANDS and each.args:
            yield ast.literal_eval(each.args[0])

"""Loads source text as a module whose tracebacks show the generated lines."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from types import ModuleType

from autopar.errors import ProgramError


def load(source: str, filename: str, tree: ast.Module | None = None) -> ModuleType:
    """Returns the module that `source` defines.

    Args:
        source: a program that `emit` wrote, possibly edited.
        filename: its name in tracebacks; need not exist, because the lines are kept with it.
        tree: the syntax tree to run instead, with the source's lines.

    Raises:
        ProgramError: the source does not parse, or running it fails.
    """
    module = ModuleType(Path(filename).stem)
    module.__file__ = filename
    # An entry without a modification time is never checked against the disk.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(tree or source, filename, "exec"), module.__dict__)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"the program {filename} does not load", why=f"{type(error).__name__}: {error}"
        ) from error
    return module

"""The patterns, one kernel or family per file; each `PATTERNS` tuple is discovered by folder."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from autopar.ir.fusion.pattern import Pattern


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    """Returns all patterns, each before the patterns that it contains.

    The order is that of the file names, then that within each file.
    """
    modules = sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
    by_file = (importlib.import_module(f"{__name__}.{m.name}").PATTERNS for m in modules)
    return tuple(pattern for group in by_file for pattern in group)


@functools.cache
def names() -> tuple[str, ...]:
    """Returns the names that `fuse` accepts for patterns."""
    return tuple(dict.fromkeys(pattern.name for pattern in patterns()))

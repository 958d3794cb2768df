"""The patterns, one kernel or family a file; a file's `PATTERNS` is a tuple, found by folder."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from autopar.ir.fusion.pattern import Pattern


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    """All patterns, longer ones before those that they contain.

    Files are taken in the order of their names, a file's patterns in its own.
    """
    modules = sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
    found = (importlib.import_module(f"{__name__}.{m.name}").PATTERNS for m in modules)
    return tuple(pattern for group in found for pattern in group)


@functools.cache
def names() -> tuple[str, ...]:
    """By what `fuse` switches them on and off."""
    return tuple(dict.fromkeys(pattern.name for pattern in patterns()))

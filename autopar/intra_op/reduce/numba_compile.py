"""Decorators that compile with numba, cached on disk, without holding the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_njit: Any = numba.njit  # its annotations lack the options for wrappers


def inner(function: Function) -> Function:
    """Compiles a function that only compiled functions call.

    Omits the entry point from Python, which takes as long to compile as the function.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, _njit(cache=True, nogil=True, **options)(function))


def entry(function: Function) -> Function:
    """Compiles a function that Python calls."""
    return cast(Function, _njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function))

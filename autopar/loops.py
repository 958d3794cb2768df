"""Compiles hot loops with numba, cached on disk, without holding the interpreter lock.

Without a folder that can be written, a process compiles for itself. Without numba the loops run as
Python, with the same results, slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

numba: Any
try:
    import numba
except ImportError:  # the loops are Python
    numba = None

Function = TypeVar("Function", bound=Callable[..., Any])


def inner(function: Function) -> Function:
    """Compiles a function that only compiled functions call.

    Omits the entry point from Python, which takes as long to compile as the function.
    """
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def entry(function: Function) -> Function:
    """Compiles a function that Python calls."""
    return _compiled(function, no_cfunc_wrapper=True)


def _compiled(function: Function, **options: bool) -> Function:
    if numba is None:
        return function
    compile_by: Any = numba.njit  # its annotations lack the options for wrappers
    try:
        return cast(Function, compile_by(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # there is no folder for the cache
        return cast(Function, compile_by(nogil=True, **options)(function))

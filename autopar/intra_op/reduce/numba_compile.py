"""How functions are compiled: by numba, cached on disk, without the lock of the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_njit: Any = numba.njit  # its annotations leave out the options for wrappers


def inner(function: Function) -> Function:
    """Compiles a function that only compiled functions call; without a way in from Python, which
    takes as long to compile as the function.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, _njit(cache=True, nogil=True, **options)(function))


def entry(function: Function) -> Function:
    """Compiles a function that Python calls."""
    return cast(Function, _njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function))

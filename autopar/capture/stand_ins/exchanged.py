"""Exchanges the code of functions of torch for that of ours while a thread traces a model.

Models import functions by name, and compile them, so that a function must stay the same object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

_LOCK = threading.Lock()
_TRACING: list[int] = []  # threads


@dataclass(frozen=True)
class Exchange:
    """A function of torch that has a stand-in.

    Attributes:
        function: the function.
        stub: the function whose code it gets.
        own: a copy with its own code.
        ours: what a tracing thread calls instead.
    """

    function: Any
    stub: Any
    own: Any
    ours: Callable[..., Any]


_EXCHANGES: dict[str, Exchange] = {}


def exchange(function: Any, stub: Any, ours: Callable[..., Any]) -> Exchange:
    """Returns the exchange of a function, which its stub finds by its own name.

    Args:
        function: of torch.
        stub: takes any arguments and returns `called` with its own name and these. Its code runs
            with the names of torch's module, so that it must import `called`.
        ours: what a tracing thread calls instead.
    """
    made = _EXCHANGES[stub.__name__] = Exchange(function, stub, _copy(function), ours)
    return made


@contextmanager
def exchanged(exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Returns a context in which this thread's trace calls our functions.

    Several threads may be in it, with the same exchanges; torch's own code returns with the last.
    """
    with _LOCK:
        _TRACING.append(threading.get_ident())
        for each in exchanges:
            each.function.__code__ = each.stub.__code__
    try:
        yield
    finally:
        with _LOCK:
            _TRACING.remove(threading.get_ident())
            for each in exchanges if not _TRACING else ():
                each.function.__code__ = each.own.__code__


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls ours instead of a function of torch while this thread traces a model."""
    each = _EXCHANGES[name]
    traces = threading.get_ident() in _TRACING and torch.compiler.is_exporting()
    return (each.ours if traces else each.own)(*args, **kwargs)


def _copy(function: Any) -> Any:
    code, name, defaults = function.__code__, function.__name__, function.__defaults__
    copy = FunctionType(code, function.__globals__, name, defaults)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy

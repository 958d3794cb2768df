"""Methods that compress gradients: every module of this folder whose name begins with a letter.

A module has an `EXAMPLE` of how a user writes its method, and a function that reads such a text:

    EXAMPLE = "top-k 1 %"
    def read(text: str) -> Messages | Factors | None: ...

A method states the bytes of its messages, for prices, and computes the messages. It imports no
torch: it calls the methods of the tensors that it receives.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module

from autopar.errors import PrecisionError
from autopar.ir.compression._method import Factors, Messages, Method

__all__ = ["Factors", "Messages", "Method", "examples", "method_of"]


@cache
def _readers() -> dict[str, Callable[[str], Method | None]]:
    found = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        if not info.name.startswith("_"):
            module = import_module(f"{__name__}.{info.name}")
            if module.EXAMPLE in found:
                raise PrecisionError(
                    f"two modules compress gradients as {module.EXAMPLE!r}",
                    where=f"{__name__}.{info.name}",
                    todo="give one of them another EXAMPLE",
                )
            found[module.EXAMPLE] = module.read
    return found


def examples() -> tuple[str, ...]:
    """Returns how each method is written."""
    return tuple(_readers())


@cache
def method_of(text: str) -> Method:
    """Returns the method that a text names; its `str` reads back.

    Raises:
        PrecisionError: no module reads it.
    """
    words = " ".join(text.split())
    for read in _readers().values():
        method = read(words)
        if method is not None:
            return method
    raise PrecisionError(
        f"gradients cannot be sent as {text[:80]!r}",
        why=f"there are {', '.join(examples())}",
        todo="write one of these, with other numbers where they have some",
    )

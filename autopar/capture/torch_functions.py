"""Makes torch's Python functions transparent for a mode that observes the calls inside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

# Not torch._tensor, whose methods call the methods that they override.
_MODULES = ("torch.nn.functional", "torch.functional")
_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def opened(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns a copy of a torch function that does not dispatch to a mode; None if it never does.

    A function such as `torch.nn.functional.gaussian_nll_loss` first checks for an active mode and
    passes itself to it as a whole. The mode then does not observe that the function raises an error
    for a negative variance. The returned function has the same code, in which this check is false.
    """
    if not isinstance(func, FunctionType) or func.__globals__["__name__"] not in _MODULES:
        return None
    code = func.__code__
    if not set(_ASKS) & set(code.co_names):
        return None
    told = func.__globals__ | dict.fromkeys(_ASKS, _never)
    alike = FunctionType(code, told, func.__name__, func.__defaults__, func.__closure__)
    alike.__kwdefaults__ = func.__kwdefaults__
    return alike


def _never(*_: object) -> bool:
    """Returns False: neither an operand nor a mode overrides the call."""
    return False

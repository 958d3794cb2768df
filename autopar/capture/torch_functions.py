"""Makes torch's Python functions transparent, for a mode that follows the calls inside them."""

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
    """Returns a function of torch that does not hand itself to a mode; None if it cannot be made.

    `torch.nn.functional.gaussian_nll_loss`, for one, first asks whether a mode is on, hands itself
    to the mode as a whole, and the mode does not see that it raises where a variance is negative.
    The function returned is the same code, which is told that no mode is on.
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
    """Says that no operand and no mode takes a call over."""
    return False

"""Computes losses in float32 while a model is traced in a narrower dtype, as torch.autocast does.

Norms and softmax need no cast: their kernels accumulate in float32 and round only the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NAMES = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
_LOSSES: frozenset[Callable[..., Any]] = frozenset(
    function
    for name, function in vars(functional).items()
    if callable(function) and (name.endswith("_loss") or name in _NAMES)
)
# The logarithms that hand-written losses often use.
_LOGARITHMS: frozenset[Callable[..., Any]] = frozenset(
    getattr(place, name)
    for place in (functional, torch, Tensor)
    for name in ("log_softmax", "logsumexp")
    if hasattr(place, name)
)
_WIDE = _LOSSES | _LOGARITHMS


class _InFloat32(TorchFunctionMode):
    """Casts operands of losses to float32.

    Args:
        narrow: the dtype in which the model computes.
    """

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.narrow = narrow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls a function; if it is a loss, casts its operands to float32."""
        kwargs = kwargs or {}
        if func in _WIDE and "dtype" not in kwargs:
            args = tuple(map(self._wide, args))
            kwargs = {name: self._wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == self.narrow:
            return value.float()
        return value


def losses_in_float32(narrow: torch.dtype | None) -> AbstractContextManager[Any]:
    """Returns a context in which losses of operands in the dtype `narrow` are float32."""
    return nullcontext() if narrow is None else _InFloat32(narrow)

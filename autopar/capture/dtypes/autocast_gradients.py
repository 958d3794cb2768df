"""Reproduces no_grad inside an autocast block, which torch.export does not record.

The operators in such a block get detached operands instead, which a trace does record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ABOUT_GRADIENTS = ("requires_grad_", "_set_grad_enabled", "detach", "detach_")


class GradientsInAutocast:
    """Follows where gradients are switched on and off while a model is traced."""

    def __init__(self) -> None:
        self._off = 0  # nested blocks inside autocast that switched gradients off

    def switch(self, on: bool) -> bool:
        """Records a switch of gradients; returns whether it can be reproduced."""
        if not _in_autocast() or on == torch.is_grad_enabled():
            return True
        self._off += -1 if on else 1
        return self._off >= 0

    @property
    def off(self) -> bool:
        """Returns whether gradients are switched off inside autocast now."""
        return bool(self._off) and not torch.is_grad_enabled()

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `func(*args, **kwargs)`, with detached operands if gradients are switched off."""
        if not self.off or name in _ABOUT_GRADIENTS:
            return func(*args, **kwargs)
        if name == "__get__":
            return _detached(func(*args, **kwargs))
        return func(*map(_detached, args), **{k: _detached(v) for k, v in kwargs.items()})


def _detached(value: Any) -> Any:
    """Returns a value with its tensors detached."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_detached, value)) if type(value) in (tuple, list) else value
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _in_autocast() -> bool:
    """Returns whether any autocast block is open, including one that is switched off."""
    depth = torch.autocast_increment_nesting() - 1  # only counting reveals the depth
    torch.autocast_decrement_nesting()
    return depth > 0

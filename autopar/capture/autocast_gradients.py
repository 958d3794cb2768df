"""no_grad inside of an autocast block, which torch.export leaves out of its trace.

The operators in there get operands without their gradients instead, which a trace shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ABOUT_GRADIENTS = ("requires_grad_", "_set_grad_enabled", "detach", "detach_")


class GradientsInAutocast:
    """Follows where gradients are switched while a model is traced."""

    def __init__(self) -> None:
        self._off = 0  # blocks in which they were switched off, all inside of autocast

    def switch(self, on: bool) -> bool:
        """Returns whether a switch can be kept: one that restores gradients or turns them off."""
        if not _in_autocast() or on == torch.is_grad_enabled():
            return True
        self._off += -1 if on else 1
        return self._off >= 0

    @property
    def off(self) -> bool:
        """Returns whether they are switched off inside of autocast now."""
        return bool(self._off) and not torch.is_grad_enabled()

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`, with operands without gradients where these are switched off."""
        if not self.off or name in _ABOUT_GRADIENTS:
            return func(*args, **kwargs)
        if name == "__get__":
            return _detached(func(*args, **kwargs))
        return func(*map(_detached, args), **{k: _detached(v) for k, v in kwargs.items()})


def _detached(value: Any) -> Any:
    """A value, tensors in it without their gradients."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_detached, value)) if type(value) in (tuple, list) else value
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _in_autocast() -> bool:
    """Returns whether a block of autocast is open, one that switches it off included."""
    depth = torch.autocast_increment_nesting() - 1  # nothing tells without counting
    torch.autocast_decrement_nesting()
    return depth > 0

"""What forwards leave in buffers: `mesh.write("norm.running_mean", running_mean)`.

A buffer has its new value when the backward is over. Until then whoever reads it, autograd and the
blocks that are computed again among them, has what the forward had. The next microbatch begins with
what the one before it left, and a step that fails leaves every buffer as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Writes:
    """The new values of one program's buffers, within a step.

    Args:
        named: what is held, by `Parameter.key`.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self._new: dict[str, Tensor] = {}

    @property
    def given(self) -> Mapping[str, Tensor]:
        """Everything that is held, buffers as the last forward left them."""
        return {**self._named, **self._new} if self._new else self._named

    def put(self, key: str, value: Tensor) -> None:
        """Keep the new value of a buffer, a copy: what it is a view of may be written or freed."""
        self._new[key] = value.detach().clone()

    @torch.no_grad()
    def settle(self) -> None:
        """Give the buffers their new values."""
        for key, value in self._new.items():
            self._named[key].copy_(value)
        self.drop()

    def drop(self) -> None:
        """Forget the new values."""
        self._new.clear()

    def apart(self, value: Tensor) -> Tensor:
        """A result that `settle` does not change: itself, or a copy of what is held."""
        storage = value.untyped_storage().data_ptr()
        held = (self._named[key].untyped_storage().data_ptr() for key in self._new)
        return value.clone() if storage in held else value

"""Buffer updates of forwards: `mesh.write("norm.running_mean", running_mean)`.

A buffer gets its new value after the backward. Until then every reader, including autograd and
recomputed blocks, sees the value of the forward. The next microbatch starts from the values that
the previous one wrote, and a step that fails leaves every buffer unchanged.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor


class Writes:
    """The new values of one program's buffers, within a step.

    Args:
        named: stored tensors, by `Parameter.key`.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self._new: dict[str, Tensor] = {}

    @property
    def given(self) -> Mapping[str, Tensor]:
        """All stored tensors, with buffers as the last forward wrote them."""
        return {**self._named, **self._new} if self._new else self._named

    def put(self, key: str, value: Tensor) -> None:
        """Stores a copy of a buffer's new value, since the value may be a view of other memory."""
        self._new[key] = value.detach().clone()

    @torch.no_grad()
    def settle(self, keys: Container[str] | None = None) -> None:
        """Gives the buffers their new values; with `keys`, only these, and discards the others."""
        for key, value in self._new.items():
            if keys is None or key in keys:
                self._named[key].copy_(value)
        self.drop()

    def drop(self) -> None:
        """Discards the new values."""
        self._new.clear()

"""Evaluated: the outputs of a forward without gradients on this device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Evaluated:
    """The outputs of one forward.

    Attributes:
        shards: output name -> this device's part of it.
        layouts: output name -> dtype, global shape and layout, "f32[8@data, 16, 96]".
        gather: returns every output whole; a collective, so every rank must call it.
    """

    shards: Mapping[str, Tensor]
    layouts: Mapping[str, str]
    gather: Callable[[], dict[str, Tensor]]

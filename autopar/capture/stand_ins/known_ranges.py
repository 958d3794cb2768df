"""Ranges of a known length whose first number is a value of the trace.

Models count the positions of new tokens as torch.arange(past, past + 1), where `past` is the number
of tokens before, a value in a decode. torch.export cannot tell that this range has one element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class KnownRanges:
    """Recognises ranges from a scalar tensor to its sum with a number."""

    def __init__(self) -> None:
        # By identity of the sum: the sum, which keeps it alive, the tensor, and the number.
        self._sums: dict[int, tuple[Tensor, Tensor, int]] = {}

    def note(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Records sums of a scalar tensor and a number, and forgets those that a write changes."""
        written = args[0] if name == "__setitem__" else result
        for known, (total, tensor, _) in list(self._sums.items()):
            if written is total or written is tensor:
                del self._sums[known]
        if name.strip("_") not in ("add", "radd") or name.endswith("d_") or len(args) != 2:
            return
        tensor, number = args if isinstance(args[0], Tensor) else reversed(args)
        if isinstance(tensor, Tensor) and tensor.dim() == 0 and type(number) is int:
            self._sums[id(result)] = result, tensor, number

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns such a range; NotImplemented for any other call."""
        if name != "arange" or len(args) != 2 or not isinstance(args[0], Tensor):
            return NotImplemented
        _, first, length = self._sums.get(id(args[1]), (None, None, 0))
        if first is not args[0] or {*kwargs} - {"dtype", "device"}:
            return NotImplemented
        options = {"dtype": first.dtype, **kwargs}
        return torch.arange(length, **options) + first.to(options["dtype"])

"""Signs, with the mean of the absolute values of a tensor as their common scale.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014), for signs with error feedback;
Karimireddy et al. (arXiv:1901.09847), algorithm 1, for this scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.compression._method import Field, Messages, Tensor

EXAMPLE = "1-bit"
_BITS = [1, 2, 4, 8, 16, 32, 64, 128]


class OneBit(Messages):
    """Eight signs to a byte."""

    def __str__(self) -> str:
        return EXAMPLE

    def fields(self, n: int) -> tuple[Field, ...]:
        """Signs and a scale."""
        return Field("u8", -(-n // 8)), Field("", 1)

    def encode(self, x: Tensor, kernels: Any) -> tuple[Tensor, ...]:
        """A bit is set for a number that is not negative."""
        rows, n = x.shape
        signs = x.new_zeros(rows, -(-n // 8) * 8)
        signs[:, :n] = x >= 0
        packed = (signs.view(rows, -1, 8) * x.new_tensor(_BITS)).sum(2)
        return packed.byte(), x.abs().mean(1, keepdim=True)

    def decode(self, fields: Sequence[Tensor], n: int, kernels: Any) -> Tensor:
        """The scale with a sign for each number."""
        packed, scale = fields
        bits = packed.unsqueeze(2) // packed.new_tensor(_BITS) % 2
        return (bits.view(len(packed), -1)[:, :n].to(scale.dtype) * 2 - 1) * scale


def read(text: str) -> Messages | None:
    """Reads "1-bit"."""
    return OneBit() if text == EXAMPLE else None

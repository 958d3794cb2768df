"""int4 blocks: 15 steps between the largest number of a block and its negative.

Two numbers share a byte, as in ZeRO++ (arXiv:2306.10209, section 3.3). The rounding error is fed
back (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.compression._method import Field, Messages, Tensor

EXAMPLE = "int4 blocks"
BLOCK = 64
STEPS = 7  # on each side of zero


class Int4(Messages):
    """Blocks of 64 numbers with one scale each."""

    def __str__(self) -> str:
        return EXAMPLE

    def fields(self, n: int) -> tuple[Field, ...]:
        """Half a byte per number of a whole block, and scales."""
        count = -(-n // BLOCK)
        return Field("u8", count * BLOCK // 2), Field("", count)

    def encode(self, x: Tensor, kernels: Any) -> tuple[Tensor, ...]:
        """Rounds to the nearest step."""
        rows, n = x.shape
        count = -(-n // BLOCK)
        numbers = x.new_zeros(rows, count * BLOCK)
        numbers[:, :n] = x
        numbers = numbers.view(rows, count, BLOCK)
        scales = numbers.abs().amax(2) / STEPS
        steps = scales.masked_fill(scales == 0, 1.0).unsqueeze(2)
        codes = ((numbers / steps).round().clamp(-STEPS, STEPS) + STEPS).view(rows, -1)
        codes = codes.nan_to_num().byte()
        return codes[:, ::2] + 16 * codes[:, 1::2], scales

    def decode(self, fields: Sequence[Tensor], n: int, kernels: Any) -> Tensor:
        """Multiplies steps by their scales."""
        packed, scales = fields
        rows, count = scales.shape
        codes = scales.new_zeros(rows, 2 * packed.shape[1])
        codes[:, ::2], codes[:, 1::2] = packed % 16, packed // 16
        numbers = (codes - STEPS).view(rows, count, BLOCK) * scales.unsqueeze(2)
        return numbers.view(rows, -1)[:, :n]


def read(text: str) -> Messages | None:
    """Reads "int4 blocks"."""
    return Int4() if text == EXAMPLE else None

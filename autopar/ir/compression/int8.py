"""int8 blocks with a float32 scale each, as in ZeRO++ (arXiv:2306.10209, section 3.3, qgZ).

Rounding errors are not fed back: they are at most 1/254 of a block's largest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from autopar.ir.compression._method import Field, Messages, Tensor
from autopar.ir.int8_blocks import BLOCK, blocks

EXAMPLE = "int8"


class Int8(Messages):
    """Blocks of 256 numbers; kernels quantise them, and sum in float32."""

    feedback: ClassVar[bool] = False

    def __str__(self) -> str:
        return EXAMPLE

    def fields(self, n: int) -> tuple[Field, ...]:
        """One byte per number of a whole block, and scales."""
        return Field("i8", blocks(n) * BLOCK), Field("f32", blocks(n))

    def encode(self, x: Tensor, kernels: Any) -> tuple[Tensor, ...]:
        """Rounds to the nearest of 255 steps."""
        rows, n = x.shape
        numbers = x.new_zeros(rows, blocks(n) * BLOCK)
        numbers[:, :n] = x
        q, scales = kernels.quantize_int8(numbers, BLOCK)
        return q, scales.float().view(rows, -1)

    def decode(self, fields: Sequence[Tensor], n: int, kernels: Any) -> Tensor:
        """Multiplies by the scales."""
        q, scales = fields
        flat = kernels.dequantize_reduce(
            q.reshape(1, -1), scales.reshape(1, -1), BLOCK, 1.0, scales.dtype
        )
        return flat.view(len(q), -1)[:, :n]

    def total(self, fields: Sequence[Tensor], n: int, kernels: Any) -> Tensor:
        """The sum in float32, in one pass."""
        q, scales = (field.contiguous() for field in fields)
        return kernels.dequantize_reduce(q, scales, BLOCK, 1.0, scales.dtype)[:n]


def read(text: str) -> Messages | None:
    """Reads "int8"."""
    return Int8() if text == EXAMPLE else None

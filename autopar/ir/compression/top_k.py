"""Top-k: sends the largest numbers of a tensor, with their indices.

Lin et al., "Deep Gradient Compression" (arXiv:1712.01887); Stich et al., "Sparsified SGD with
Memory" (arXiv:1809.07599), for the convergence with error feedback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autopar.ir.compression._method import Field, Messages, Tensor

EXAMPLE = "top-k 1 %"
_TEXT = re.compile(r"top-k (\d{1,2}(?:\.\d{1,6})?|100) ?%")


@dataclass(frozen=True)
class TopK(Messages):
    """The largest by absolute value.

    Attributes:
        percent: percentage of numbers, as text; at least one number of a tensor.
    """

    percent: str

    def __str__(self) -> str:
        return f"top-k {self.percent} %"

    def kept(self, n: int) -> int:
        """Returns how many of n numbers are sent."""
        return max(math.ceil(Fraction(self.percent) * n / 100), 1) if n else 0

    def fields(self, n: int) -> tuple[Field, ...]:
        """Numbers and their places."""
        return Field("", self.kept(n)), Field("i32", self.kept(n))

    def encode(self, x: Tensor, kernels: Any) -> tuple[Tensor, ...]:
        """Returns the largest numbers of every row, in the order of their indices."""
        places = x.abs().topk(self.kept(x.shape[1]), 1).indices.sort(1).values
        return x.gather(1, places), places.int()

    def decode(self, fields: Sequence[Tensor], n: int, kernels: Any) -> Tensor:
        """The numbers among zeros."""
        numbers, places = fields
        return numbers.new_zeros(len(numbers), n).scatter(1, places.long(), numbers)


def read(text: str) -> Messages | None:
    """Reads "top-k 1 %", with any percentage above zero."""
    match = _TEXT.fullmatch(text)
    return TopK(match[1]) if match and Fraction(match[1]) else None

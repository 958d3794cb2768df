"""Low-rank factors by one step of subspace iteration, begun where the last one ended.

    P = sum of M Q,   P orthonormal,   Q = sum of M^T P,   sum of M = P Q^T

Vogels, Karimireddy & Jaggi, "PowerSGD" (arXiv:1905.13727), algorithms 1 and 2. A device's residual
is M - P (M^T P)^T, so the sum of all residuals is the error of the sum of factors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.ir.compression._method import Factors, Reduction, Tensor

EXAMPLE = "powersgd rank 4"
_TEXT = re.compile(r"powersgd rank ([1-9]\d{0,3})")
_TINY = 1e-30  # a column that is zero stays zero


@dataclass(frozen=True)
class PowerSGD(Factors):
    """Two matrices of `rank` columns."""

    rank: int

    def __str__(self) -> str:
        return f"powersgd rank {self.rank}"

    def sizes(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the sizes of P and of Q."""
        return self.rank * rows, self.rank * columns

    def reduce(self, x: Tensor, memory: dict[str, Tensor]) -> Reduction:
        """One step, from the Q of the last one."""
        q = memory.get("q", x.new_zeros(x.shape[1], self.rank))
        # At first, and where a gradient has vanished, any direction is as good as another.
        q = q + self._start(q) * (q.abs().amax(0) == 0)
        p = yield x @ q
        p = _orthonormal(p)
        own = x.t() @ p
        q = yield own
        memory["q"] = q
        return p @ q.t(), p @ own.t()

    @staticmethod
    def _start(q: Tensor) -> Tensor:
        """Returns cos(i (j + 1) + j) for row i and column j of q."""
        rows, columns = (q.new_ones(count).cumsum(0) - 1 for count in q.shape)
        return (rows.unsqueeze(1) * (columns + 1) + columns).cos()


def _orthonormal(p: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns, by modified Gram-Schmidt."""
    basis = p.clone()
    for number in range(p.shape[1]):
        column, later = basis[:, number], basis[:, number + 1 :]
        column /= column.norm().clamp_min(_TINY)
        later -= column.unsqueeze(1) * (column @ later)
    return basis


def read(text: str) -> Factors | None:
    """Reads "powersgd rank 4", with any rank."""
    match = _TEXT.fullmatch(text)
    return PowerSGD(int(match[1])) if match else None

"""Descriptions of the work of one device, the input of cost models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CHUNK = 2048  # rows of logits in memory at a time, enough to keep a GPU busy


@dataclass(frozen=True)
class Gemm:
    """`batch` matrix products of m x k by k x n elements, on one device."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Two operations, a multiplication and an addition, per element of batch x m x n x k."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Convolved:
    """Convolution that runs as a product of matrices.

    Attributes:
        result: "forward", or what its gradient is of: "image" or "weight".
        winograd: whether Winograd's transforms may save multiplications: of 3 x 3 pixels one apart.
    """

    result: Literal["forward", "image", "weight"]
    winograd: bool = False


@dataclass(frozen=True)
class Work:
    """One kernel on one device, with its FLOPs and bytes moved.

    `dtype` is that of the operands. `gemm` is the shape for matrix units, None on vector units.
    `share` is the part of the kernel's time that this work takes, where several operators are one
    kernel. `convolved` is set if the product is a convolution.
    """

    op: str
    flops: float
    nbytes: float
    dtype: str
    gemm: Gemm | None = None
    share: float = 1.0
    convolved: Convolved | None = None


@dataclass(frozen=True)
class NodeWork:
    """The kernels of one operator run once: forwards, and backwards if it has a gradient."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()

"""Describes the work of one device, as input of cost models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CHUNK = 2048  # rows of logits in memory at a time, enough to keep a GPU busy


@dataclass(frozen=True)
class Gemm:
    """`batch` matrix products of m x k by k x n elements, on one device.

    Attributes:
        rows: a number of elements that the rows of operands and results in memory are all a
            multiple of; 0 if it does not matter, as in tiles that a kernel lays out itself.
    """

    batch: int
    m: int
    n: int
    k: int
    rows: int

    @property
    def flops(self) -> float:
        """Two operations, a multiplication and an addition, per element of batch x m x n x k."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Convolved:
    """A convolution that runs as a matrix product.

    Attributes:
        result: "forward", or the operand whose gradient is computed: "image" or "weight".
        winograd: whether Winograd's transforms may save multiplications: for 3 x 3 kernels with
            stride 1 and dilation 1.
    """

    result: Literal["forward", "image", "weight"]
    winograd: bool = False


@dataclass(frozen=True)
class Work:
    """One kernel on one device, with its FLOPs and the bytes that it moves.

    `dtype` is the dtype of the operands. `gemm` is the shape of the product on matrix units, None
    on vector units. If one kernel computes several operators, `share` is this work's fraction of
    the kernel's time. `convolved` is set if the product is a convolution.
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
    """The kernels of one run of an operator: its forward, and its backward if it has gradients."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()

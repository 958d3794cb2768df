"""Descriptions of the work of one device, the input of cost models."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.collective import Collective
from autopar.ir.tensor import DTYPE_BYTES, TensorType
from autopar.ir.update import Products


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
class Work:
    """One kernel on one device, with its FLOPs and bytes moved.

    `dtype` is that of the operands. `gemm` is the shape for matrix units, None on vector units.
    """

    op: str
    flops: float
    nbytes: float
    dtype: str
    gemm: Gemm | None = None


@dataclass(frozen=True)
class NodeWork:
    """The kernels of one operator run once: forwards, and backwards if it has a gradient."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()


def quantising(call: Collective) -> tuple[Work, ...]:
    """Returns the kernels before and after a compressed collective, both bound by memory."""
    kernel = Work("quantize", 0.0, call.quantised / 2, "f32")
    return (kernel, kernel) if call.quantised else ()


def optimizer_work(nbytes: float, states: float, dtype: str) -> Work:
    """Returns the work of updating `nbytes` bytes of parameters in one pass.

    Reads the gradient, and reads and writes the parameter and `states` bytes of its states. Takes
    about four operations for each of their values.
    """
    values = (nbytes + states) / DTYPE_BYTES[dtype]
    return Work("optimizer", 4 * values, 3 * nbytes + 2 * states, dtype)


def products_works(products: Products | None, own: TensorType) -> tuple[Work, ...]:
    """Returns the products of matrices in the update of one parameter of type `own`.

    Each reads both operands and writes its result once.
    """
    if products is None:
        return ()
    dtype = products.dtype or own.dtype
    works = []
    for m, n, k in products.sizes(own.shape):
        gemm = Gemm(1, m, n, k)
        moved = float((m * k + k * n + m * n) * DTYPE_BYTES[dtype])
        works.append(Work("update_matmul", gemm.flops, moved, dtype, gemm))
    return tuple(works)


def adamw_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """Returns the work of the AdamW kernel that also writes lower-precision copies of parameters.

    Reads and writes `nbytes` bytes of parameters and both moments, reads gradients, and writes
    `rounded` bytes in lower precision. Takes 15 operations per value.
    """
    return Work("adamw_", 15 * nbytes / DTYPE_BYTES[dtype], 7 * nbytes + rounded, dtype)


def rounding_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """Returns the work of rounding `nbytes` bytes of masters to `rounded` bytes of parameters."""
    return Work("rounding", nbytes / DTYPE_BYTES[dtype], nbytes + rounded, dtype)

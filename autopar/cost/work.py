"""Work that belongs to no operator of the graph: quantising, and the optimizer's step."""

from __future__ import annotations

import math

from autopar.ir.collective import Collective
from autopar.ir.tensor import DTYPE_BYTES, TensorType
from autopar.ir.update import Products
from autopar.operators.device_work import Convolved, Gemm, NodeWork, Work

__all__ = [
    "Convolved",
    "Gemm",
    "NodeWork",
    "Work",
    "accumulation_work",
    "adamw_work",
    "optimizer_work",
    "products_works",
    "quantising",
    "rounding_work",
]


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
        gemm = Gemm(1, m, n, k, rows=math.gcd(n, k))
        moved = float((m * k + k * n + m * n) * DTYPE_BYTES[dtype])
        works.append(Work("update_matmul", gemm.flops, moved, dtype, gemm))
    return tuple(works)


def adamw_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """Returns the work of the AdamW kernel that also writes lower-precision copies of parameters.

    Reads and writes `nbytes` bytes of parameters and both moments, reads gradients, and writes
    `rounded` bytes in lower precision. Takes 15 operations per value.
    """
    return Work("adamw_", 15 * nbytes / DTYPE_BYTES[dtype], 7 * nbytes + rounded, dtype)


def accumulation_work(gradient: float, total: float, dtype: str) -> Work:
    """Returns the work of adding a gradient to those of earlier microbatches.

    Reads both and writes the sum.

    Args:
        gradient, total: bytes of the gradient, and of the sum, which may be in higher precision.
        dtype: of the sum.
    """
    return Work("aten.add.Tensor", total / DTYPE_BYTES[dtype], gradient + 2 * total, dtype)


def copy_work(read: float, written: float, dtype: str) -> Work:
    """Returns the work of copying `read` bytes into `written` bytes of elements of `dtype`."""
    return Work("aten.copy_", 0.0, read + written, dtype)


def rounding_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """Returns the work of rounding `nbytes` bytes of masters to `rounded` bytes of parameters."""
    return Work("rounding", nbytes / DTYPE_BYTES[dtype], nbytes + rounded, dtype)

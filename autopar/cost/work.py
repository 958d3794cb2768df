"""Work that belongs to no operator of the graph: quantising, and the optimizer's step."""

from __future__ import annotations

from autopar.ir.collective import Collective
from autopar.ir.tensor import DTYPE_BYTES
from autopar.operators.device_work import Gemm, NodeWork, Work

__all__ = [
    "Gemm",
    "NodeWork",
    "Work",
    "adamw_work",
    "optimizer_work",
    "quantising",
    "rounding_work",
]


def quantising(call: Collective) -> tuple[Work, ...]:
    """Returns the kernels before and after a collective of int8 blocks, both bound by memory."""
    kernel = Work("quantize", 0.0, call.quantised / 2, "f32")
    return (kernel, kernel) if call.quantised else ()


def optimizer_work(nbytes: float, state_bytes: float, dtype: str) -> Work:
    """Returns the work of updating `nbytes` bytes of parameters in one pass.

    Reads the gradient, and reads and writes the parameter and its state, which is `state_bytes`
    times as large (2 for AdamW). Takes about four operations per value.
    """
    values = nbytes / DTYPE_BYTES[dtype]
    moved = nbytes * (3 + 2 * state_bytes)
    return Work("optimizer", 4 * values * (1 + state_bytes), moved, dtype)


def adamw_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """Returns the work of the AdamW kernel that also writes lower-precision copies of parameters.

    Reads and writes `nbytes` bytes of parameters and both moments, reads gradients, and writes
    `rounded` bytes in lower precision. Takes 15 operations per value.
    """
    return Work("adamw_", 15 * nbytes / DTYPE_BYTES[dtype], 7 * nbytes + rounded, dtype)


def rounding_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """Returns the work of rounding `nbytes` bytes of masters to `rounded` bytes of parameters."""
    return Work("rounding", nbytes / DTYPE_BYTES[dtype], nbytes + rounded, dtype)

"""Work: what one device computes, as a cost model sees it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.collective import Collective
from autopar.ir.tensor import DTYPE_BYTES


@dataclass(frozen=True)
class Gemm:
    """`batch` matrix products of m x k by k x n elements, on one device."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each of batch x m x n x k."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Work:
    """One kernel on one device: its share of FLOPs and of bytes moved.

    `dtype` is that of the operands. `gemm` is the shape of what matrix units can do, None for what
    runs on vector units.
    """

    op: str
    flops: float
    nbytes: float
    dtype: str
    gemm: Gemm | None = None


@dataclass(frozen=True)
class NodeWork:
    """The kernels of one operator, run once: forwards, and backwards where it has a gradient."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()


def quantising(call: Collective) -> tuple[Work, ...]:
    """The kernels of a collective of int8 blocks: before it and after it, bound by memory."""
    kernel = Work("quantize", 0.0, call.quantised / 2, "f32")
    return (kernel, kernel) if call.quantised else ()


def optimizer_work(nbytes: float, state_bytes: float, dtype: str) -> Work:
    """The update of parameters of `nbytes` bytes in one pass.

    Parameter and gradient are read and the parameter written; the state, `state_bytes` times as
    large (AdamW: 2), is read and written. Some four operations for each of the values.
    """
    values = nbytes / DTYPE_BYTES[dtype]
    moved = nbytes * (3 + 2 * state_bytes)
    return Work("optimizer", 4 * values * (1 + state_bytes), moved, dtype)


def adamw_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """The update of parameters of `nbytes` bytes by the kernel that also writes what is held.

    Parameter and both moments are read and written, gradients read, and `rounded` bytes of what is
    held in a lower precision written. 15 operations for each of the values.
    """
    return Work("adamw_", 15 * nbytes / DTYPE_BYTES[dtype], 7 * nbytes + rounded, dtype)


def rounding_work(nbytes: float, rounded: float, dtype: str) -> Work:
    """What is held made of `nbytes` bytes of masters: `rounded` bytes in a lower precision."""
    return Work("rounding", nbytes / DTYPE_BYTES[dtype], nbytes + rounded, dtype)

"""Triton if it is installed; without it the kernels stay plain functions and references run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
except ImportError:
    triton = None
tl: Any = triton and triton.language


def jit(function: Callable[..., None]) -> Any:
    """Applies `triton.jit`; returns the function unchanged without Triton."""
    return function if triton is None else triton.jit(function)


def available() -> bool:
    """Returns whether Triton is installed."""
    return triton is not None


def interpreting() -> bool:
    """Returns whether kernels run in Triton's interpreter, on CPU tensors."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def architecture() -> str:
    """Returns the architecture kernels are compiled for, such as "sm_90"; "" without a GPU."""
    if triton is None or interpreting():
        return ""
    try:
        return f"sm_{triton.runtime.driver.active.get_current_target().arch}"
    except RuntimeError:  # no driver is active: there is no GPU
        return ""


def power_of_2(n: int) -> int:
    """Returns the least power of two that is at least n, a legal block size."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, size: int) -> int:
    """Returns the number of blocks of `size` for n elements."""
    return -(-n // size)


def processors(x: Tensor) -> int:
    """Returns the number of processors of x's device, for kernels whose programs share all rows."""
    if x.is_cuda:
        return torch.cuda.get_device_properties(x.device).multi_processor_count
    return 2 if interpreting() else 132  # an H100's, if the kernel is only compiled

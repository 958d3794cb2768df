"""Triton where it is installed; without it the kernels stay unread functions and references run."""

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
    """`triton.jit`; the function as it is where there is no Triton to launch it."""
    return function if triton is None else triton.jit(function)


def available() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def architecture() -> str:
    """What kernels are compiled for, as the table of launches names it: "sm_90"; "" for nothing."""
    if triton is None or interpreting():
        return ""
    try:
        return f"sm_{triton.runtime.driver.active.get_current_target().arch}"
    except RuntimeError:  # no driver is active: there is no GPU
        return ""


def power_of_2(n: int) -> int:
    """The least power of two that is at least n: blocks have such sizes."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` hold n elements."""
    return -(-n // size)


def processors(x: Tensor) -> int:
    """Processors of the device that x is on, for kernels whose programs share all rows."""
    if x.is_cuda:
        return torch.cuda.get_device_properties(x.device).multi_processor_count
    return 2 if interpreting() else 132  # an H100's, where a kernel is compiled only

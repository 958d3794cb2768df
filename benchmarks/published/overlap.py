"""Seconds of exposed communication, when it overlaps with kernels."""

from __future__ import annotations

from autopar.cost.device import devices
from autopar.cost.overlap import side_by_side

SLOWDOWN = {device.name: device.slowdown for device in devices()}["H100"]


def overlapped(kernels: float, calls: float) -> float:
    """Returns the seconds of kernels and of collectives that may overlap with any of them."""
    return side_by_side(kernels, calls, SLOWDOWN)


def chunked(kernels: float, calls: float, chunks: int) -> float:
    """Returns the same for collectives in chunks that overlap with the kernels that need them.

    The first chunk's collective (or the last chunk's) overlaps with nothing.
    """
    return calls / chunks + overlapped(kernels, calls * (1 - 1 / chunks))

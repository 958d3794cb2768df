"""Seconds of exposed communication, when it overlaps with kernels."""

from __future__ import annotations

from autopar.cost.device import devices
from autopar.cost.overlap import side_by_side

SLOWDOWN = {device.name: device.slowdown for device in devices()}["H100"]


def beside(kernels: float, calls: float) -> float:
    """Seconds of kernels and of collectives that may run at any time beside them."""
    return side_by_side(kernels, calls, SLOWDOWN)


def chunked(kernels: float, calls: float, chunks: int) -> float:
    """The same for collectives cut in chunks beside the kernels that need them.

    The first chunk's collective (or the last one's) has nothing to run beside.
    """
    return calls / chunks + beside(kernels, calls * (1 - 1 / chunks))

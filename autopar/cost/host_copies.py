"""Time of copies between a device and the memory of its host."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.device import Device


@dataclass(frozen=True)
class HostCopy:
    """One copy of `nbytes` bytes between a device and host memory.

    Attributes:
        nbytes: size in bytes.
        back: whether it goes from the host to the device.
    """

    nbytes: float
    back: bool = False


def host_seconds(device: Device, nbytes: float, copies: int = 1) -> float:
    """Returns the seconds of copies in one direction; the link carries both directions at once.

    Args:
        device: the device, with the figures of its host link.
        nbytes: total bytes.
        copies: number of copies, each of which pays a launch.
    """
    rate = device.host_bandwidth * device.host_efficiency
    return copies * device.launch + nbytes / rate if nbytes else 0.0

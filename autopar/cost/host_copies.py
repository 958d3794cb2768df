"""What a copy between a device and its host takes, and what of the host's memory is a device's."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.device import Device


@dataclass(frozen=True)
class HostCopy:
    """One copy of `nbytes` bytes, to host memory or back.

    Attributes:
        nbytes: how much.
        back: whether it comes back to the device.
    """

    nbytes: float
    back: bool = False


def host_seconds(device: Device, nbytes: float, copies: int = 1) -> float:
    """Seconds of copies one way; the link carries both ways at once.

    Args:
        device: whose link to its host it is.
        nbytes: of all of them.
        copies: how many there are, each of which is launched.
    """
    rate = device.host_bandwidth * device.host_efficiency
    return copies * device.launch + nbytes / rate if nbytes else 0.0

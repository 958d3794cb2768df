"""The host's figures in a calibration: seconds in which it issues a kernel or a collective.

They are measured on accelerators, whose hosts run ahead of them. A calibration lists them among its
kernels, as "host operator" and so on, each of one byte. They replace the row "eager" of
tables/hosts.csv, which is how emitted programs run.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cost.calibration import Kernel, Timing
from autopar.cost.kernel_tables import Host

ROLES = ("operator", "autograd", "collective", "optimizer")
MEASURED = "eager"
_PREFIX = "host "


def host_kernel(role: str, time: Timing) -> Kernel:
    """Returns the point of a calibration for one of `ROLES`."""
    return Kernel(_PREFIX + role, "f32", 0.0, 1.0, time)


def is_host(kernel: Kernel) -> bool:
    """Returns whether a point is a figure of the host."""
    return kernel.op.startswith(_PREFIX)


def role_of(kernel: Kernel) -> str:
    """Returns which of `ROLES` a figure of the host has."""
    return kernel.op.removeprefix(_PREFIX)


def host_of(kernels: Iterable[Kernel], device: str) -> Host | None:
    """Returns the figures of the host of a measured device; None unless all were measured."""
    found = {role_of(kernel): kernel.time.seconds for kernel in kernels if is_host(kernel)}
    return Host(measured=device, **found) if set(found) == set(ROLES) else None


def named_host(name: str, measured: Host | None) -> Host | None:
    """Returns the host that an execution names, the measured one if possible; None for ""."""
    if measured is not None and name == MEASURED:
        return measured
    return Host.of(name) if name else None

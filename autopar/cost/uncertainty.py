"""Uncertainty of predicted seconds, from the errors of the kernel tables on held-out data.

The error of a sum is at most the sum of the errors: shapes repeat from layer to layer, so that
their errors do not cancel. An error is a median over the held-out measurements. If none were held
out, the constants that another device lends count as taken over.
"""

from __future__ import annotations

from autopar.cost.device import Device, device, devices
from autopar.cost.kernel_tables import Row
from autopar.ir.mesh import Mesh

# The error of kernels that were never measured, and the factor on the errors of kernels that were
# measured on another device. Both are estimates.
UNMEASURED, TAKEN_OVER = 0.25, 2.0


def relative_error(device: Device, table: str) -> float:
    """Returns the median relative error of a device's prices by one of its tables.

    Args:
        device: described, or of devices.toml.
        table: "products", "attention" or "links".
    """
    row: Row | None = getattr(device, table)
    if row is None or not row.measured:
        return UNMEASURED
    own = row.measured == device.name
    base = getattr(row, "base", "") if own else row.measured
    if not base:
        return row.error
    (source,) = (entry for entry in devices() if entry.name == base)
    return max(row.error, min(TAKEN_OVER * relative_error(source, table), UNMEASURED))


def step_error(mesh: Mesh, seconds: float, calibration: str = "") -> float:
    """Returns by how many seconds a whole step may be off; 0 if a calibration priced it.

    Of unlike devices, the least certain counts.
    """
    if calibration:
        return 0.0
    return seconds * max(relative_error(device(part), "products") for part in mesh.parts)


def error_seconds(device: Device, computed: float, sent: float) -> float:
    """Returns by how many seconds a step may be off.

    Args:
        device: the device that runs it.
        computed: seconds of its kernels, which are priced as products.
        sent: seconds of its collectives.
    """
    return computed * relative_error(device, "products") + sent * relative_error(device, "links")

"""Seconds of one operator: the roofline."""

from __future__ import annotations

from autopar.cost.device import Device


def roofline(device: Device, flops: float, nbytes: float, dtype: str, matmul: bool) -> float:
    """Seconds of one kernel: the slower of computing and moving bytes, plus its launch.

    max(flops / (peak * efficiency), nbytes / (bandwidth * efficiency)) + launch (Williams,
    Waterman & Patterson, "Roofline", CACM 52(4), 2009). What neither computes nor moves anything,
    a view, launches nothing and is free.

    Raises:
        CostError: a dtype that the device has no peak for.
    """
    if not flops and not nbytes:
        return 0.0
    computing = flops / (device.rate(dtype, matmul) * device.matmul_efficiency)
    moving = nbytes / (device.memory_bandwidth * device.memory_efficiency)
    return max(computing, moving) + device.launch

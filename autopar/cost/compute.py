"""Seconds of one kernel: the roofline model, with tiles and waves for matrix products.

A kernel takes the longer of its computing time and its memory time, plus its launch: Williams,
Waterman & Patterson, "Roofline", CACM 52(4), 2009. The computing rate depends on the shape of the
matrices, as NVIDIA's "Matrix Multiplication Background User's Guide" (sections 2.2 and 3) explains:

    tile quantisation   the result is cut into tiles; a partly filled tile takes full time
    wave quantisation   processors run one tile each at a time; a last wave with a single tile takes
                        as long as a full wave
    small tiles         waste less, but load more per product, so they are less efficient
    short k             filling and draining the pipeline takes as long as `k_half` more products
                        in 16 bits
    split k             if tiles are few, several processors share one and their parts are added

A library tries several tiles and splits; the fastest counts. Time grows with each of m, n and k.
"""

from __future__ import annotations

import math

from autopar.cost.device import Device
from autopar.cost.work import Gemm

_SPLITS = (1, 2, 4, 8, 16, 32)
_NARROW = 8  # vector units may be faster with fewer rows or columns than this
_ATTENTION = ("aten.scaled_dot_product_attention", "aten.scaled_dot_product_attention backward")


def kernel_seconds(
    device: Device, op: str, flops: float, nbytes: float, dtype: str, gemm: Gemm | None = None
) -> float:
    """Returns the seconds of one kernel; 0 if it neither computes nor moves anything.

    Args:
        device: the device that runs it.
        op: name of the operator; fused attention has its own efficiency.
        flops: floating-point operations; on vector units if `gemm` is None.
        nbytes: bytes read and written.
        dtype: dtype of the operands, as in the IR, or "tf32".
        gemm: shape of the matrix product, if it is one.

    Raises:
        CostError: the device has no peak for the dtype.
    """
    if not flops and not nbytes:
        return 0.0
    moving = memory_seconds(device, nbytes)
    vector = flops / device.rate(dtype, matmul=False)
    if gemm is None:
        return max(vector, moving) + device.launch
    if op in _ATTENTION:
        return max(_attention_seconds(device, gemm, dtype), moving) + device.launch
    computing = gemm_seconds(device, gemm, dtype)
    if min(gemm.m, gemm.n) < _NARROW:
        computing = min(computing, max(vector, moving))
    return max(computing, moving) + device.launch


def _attention_seconds(device: Device, gemm: Gemm, dtype: str) -> float:
    """Returns the seconds of fused attention.

    A processor runs one block of queries after another through all keys. Blocks of queries, heads
    and samples run in parallel (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.2).
    """
    rows = min(device.tiles[0][:2])
    blocks = gemm.batch * -(-gemm.m // rows)
    waves = -(-blocks // device.processors)
    rate = device.rate(dtype, matmul=True) * device.attention_efficiency / device.processors
    return waves * 2.0 * rows * gemm.n * gemm.k / rate


def memory_seconds(device: Device, nbytes: float) -> float:
    """Returns the seconds to move `nbytes` bytes between memory and processor.

    Filling the memory pipeline takes as long as moving `memory_ramp` more bytes (Little's law:
    bandwidth times latency).
    """
    if not nbytes:
        return 0.0
    return (nbytes + device.memory_ramp) / (device.memory_bandwidth * device.memory_efficiency)


def gemm_seconds(device: Device, gemm: Gemm, dtype: str) -> float:
    """Returns the computing seconds of matrix products, assuming that memory keeps up."""
    if not gemm.flops:
        return 0.0
    rate = device.rate(dtype, matmul=True)
    peak = rate * device.matmul_efficiency / device.processors
    # The ramp-up takes proportionally longer in a slower dtype.
    start = device.k_half * rate / device.rate("f16", matmul=True)
    best = math.inf
    for tile_m, tile_n, efficiency in device.tiles:
        tiles = gemm.batch * -(-gemm.m // tile_m) * -(-gemm.n // tile_n)
        for split in _SPLITS:
            waves = -(-tiles * split // device.processors)
            length = -(-gemm.k // split) + start
            seconds = waves * 2 * tile_m * tile_n * length / (peak * efficiency)
            if split > 1:  # every part of the result is written and read in f32
                parts = 8.0 * split * gemm.batch * gemm.m * gemm.n
                seconds += memory_seconds(device, parts) + device.launch
            best = min(best, seconds)
            if tiles * split >= device.processors:
                break
    return best

"""Seconds of one kernel: the roofline, with tiles and waves where matrices are multiplied.

A kernel takes as long as the slower of computing and moving bytes, and its launch: Williams,
Waterman & Patterson, "Roofline", CACM 52(4), 2009. How fast it computes depends on the shape of the
matrices, as NVIDIA's "Matrix Multiplication Background User's Guide" (sections 2.2 and 3) explains:

    tile quantisation   the result is cut into tiles; a tile that is partly empty takes as long
    wave quantisation   as many tiles as there are processors run at once; so does a last wave
                        with a single tile
    small tiles         waste less but load more for each product: they are less efficient
    short k             filling and emptying the pipeline takes as long as `k_half` more products
                        in 16 bits
    split k             of few tiles, several processors share each; their parts are then added

A library tries several tiles and splits: the least time counts. It grows with each of m, n and k.
"""

from __future__ import annotations

import math

from autopar.cost.device import Device
from autopar.cost.work import Gemm

_SPLITS = (1, 2, 4, 8, 16, 32)
_NARROW = 8  # rows or columns under which vector units may be faster
_ATTENTION = ("aten.scaled_dot_product_attention", "aten.scaled_dot_product_attention backward")


def kernel_seconds(
    device: Device, op: str, flops: float, nbytes: float, dtype: str, gemm: Gemm | None = None
) -> float:
    """Seconds of one kernel; what neither computes nor moves anything is no kernel, and free.

    Args:
        device: where it runs.
        op: its name; fused attention has an efficiency of its own.
        flops: floating-point operations, for vector units where `gemm` is None.
        nbytes: bytes read and written.
        dtype: of the operands, as in the IR, or "tf32".
        gemm: the shape of what it multiplies.

    Raises:
        CostError: a dtype that the device has no peak for.
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
    """A processor takes one block of queries after another through all keys.

    Blocks of queries, heads and samples are what runs in parallel (Dao, "FlashAttention-2", arXiv
    2307.08691, section 3.2).
    """
    rows = min(device.tiles[0][:2])
    blocks = gemm.batch * -(-gemm.m // rows)
    waves = -(-blocks // device.processors)
    rate = device.rate(dtype, matmul=True) * device.attention_efficiency / device.processors
    return waves * 2.0 * rows * gemm.n * gemm.k / rate


def memory_seconds(device: Device, nbytes: float) -> float:
    """Seconds to move `nbytes` bytes between memory and processor.

    So much must be under way to fill the pipeline that it takes as long as `memory_ramp` bytes
    (Little's law: bandwidth times latency).
    """
    if not nbytes:
        return 0.0
    return (nbytes + device.memory_ramp) / (device.memory_bandwidth * device.memory_efficiency)


def gemm_seconds(device: Device, gemm: Gemm, dtype: str) -> float:
    """Seconds of computing matrix products, as long as memory keeps up."""
    if not gemm.flops:
        return 0.0
    rate = device.rate(dtype, matmul=True)
    peak = rate * device.matmul_efficiency / device.processors
    # Loading the first operands takes as long for a dtype that is computed slowly.
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

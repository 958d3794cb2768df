"""Seconds of one kernel: the roofline model, with tiles and waves for matrix products.

A kernel takes its launch and the longer of its computing time c and its memory time m: Williams,
Waterman & Patterson, "Roofline", CACM 52(4), 2009. If both are similar they slow each other down,
so a product takes (c^3 + m^3)^(1/3). The computing rate depends on the shape of the matrices, as
NVIDIA's "Matrix Multiplication Background User's Guide" (sections 2.2 and 3) explains:

    tile quantisation   the result is cut into tiles; a partly filled tile takes full time
    wave quantisation   processors run one tile each at a time; a last wave with a single tile takes
                        as long as a full wave
    small tiles         waste less, but load more per product, so they are less efficient
    short k             filling and draining the pipeline takes as long as `k_half` more products
                        in 16 bits, and a term takes at least `k_latency`, however small the tile
    split k             if tiles are few, several processors share one and their parts are added
    clocks              a long kernel computes at lower clocks than a short one
    alignment           matrix units are fed 16 bytes at a time: rows that begin elsewhere take
                        narrower loads (the guide's section 2.1)

A library tries several tiles and splits; the fastest counts. Time grows with each of m, n and k.
A convolution is an implicit product of pixels, channels and kernel (Chetlur et al., "cuDNN", arXiv
1410.0759, section 3), which attains a share of a plain product's rate; where Winograd's transforms
apply, it multiplies less (Lavin & Gray, arXiv 1509.09308).

The constants are in tables/products.csv and tables/convolutions.csv (cost/kernel_tables.py). In a
long step, clocks are low and kernels share the device with other work: computing then takes
`1 / step_efficiency` of a short kernel's time, a figure of the device (devices.toml), and longer
the more devices wait for their slowest one (`Device.step_share`). The figure was fitted to steps on
matrix units and, of V100, holds for convolutions in f32. Products on vector units draw less power
and keep the rate that they have alone (benchmarks/results/steps.csv: GPT-2 in f32).
"""

from __future__ import annotations

import math

from autopar.cost.attention_seconds import NAMES as ATTENTION
from autopar.cost.attention_seconds import ORDERED, attention_seconds
from autopar.cost.device import Device
from autopar.cost.work import Convolved, Gemm
from autopar.ir.tensor import DTYPE_BYTES

_SPLITS = (1, 2, 4, 8, 16, 32)
_NARROW = 8  # vector units may be faster with fewer rows or columns than this
_BLEND = 3.0
# The share of the rate that is left where rows begin at multiples of so many bytes only. Of 2 and 4
# bytes: a vocabulary of 50257 in bf16 and in tf32 on an H200 (benchmarks/results/products.csv); of
# 8 bytes, which was not measured, the mean of the logarithms of 4 and 16.
_UNALIGNED = {2: 0.135, 4: 0.357, 8: 0.597}


def kernel_seconds(
    device: Device,
    op: str,
    flops: float,
    nbytes: float,
    dtype: str,
    gemm: Gemm | None = None,
    *,
    in_step: int = 0,
    convolved: Convolved | None = None,
) -> float:
    """Returns the seconds of one kernel; 0 if it neither computes nor moves anything.

    Args:
        device: the device that runs it.
        op: name of the operator; fused attention has its own formula.
        flops: floating-point operations; on vector units if `gemm` is None.
        nbytes: bytes read and written.
        dtype: dtype of the operands, as in the IR, or "tf32".
        gemm: shape of the matrix product, if it is one.
        in_step: number of devices of the long step that it is part of; 0 if it runs alone.
        convolved: how a convolution runs as the product `gemm`.

    Raises:
        CostError: the device has no peak for the dtype.
    """
    if not flops and not nbytes:
        return 0.0
    vector = flops / device.rate(dtype, matmul=False)
    if gemm is None:
        return max(vector, memory_seconds(device, nbytes)) + device.launch
    units = device.rate(dtype, matmul=True) > device.rate(dtype, matmul=False)
    in_step *= units or convolved is not None
    left = device.step_share(in_step) if in_step else 1.0
    if op in (*ATTENTION, ORDERED):
        rate, back = device.rate(dtype, matmul=True) * left, op != ATTENTION[0]
        moving = nbytes / device.memory_bandwidth
        return attention_seconds(
            device.attention, gemm, rate, device.processors, moving, back, op == ORDERED
        )
    moving = _operand_seconds(device, nbytes)
    computing = gemm_seconds(device, gemm, dtype)
    if min(gemm.m, gemm.n) < _NARROW:
        computing = min(computing, max(vector, moving))
    call = device.launch
    if convolved is not None:
        computing /= device.convolutions.rate(convolved, dtype)
        call += device.convolutions.call(convolved)
    if in_step:
        computing /= left
    else:
        table = device.products
        computing *= 1 + table.throttle * computing / (computing + table.throttle_after)
    return float((computing**_BLEND + moving**_BLEND) ** (1 / _BLEND)) + call


def memory_seconds(device: Device, nbytes: float) -> float:
    """Returns the seconds to move `nbytes` bytes between memory and processor.

    Filling the memory pipeline takes as long as moving `memory_ramp` more bytes (Little's law:
    bandwidth times latency).
    """
    if not nbytes:
        return 0.0
    return (nbytes + device.memory_ramp) / (device.memory_bandwidth * device.memory_efficiency)


def _operand_seconds(device: Device, nbytes: float) -> float:
    """Returns the seconds to move the operands and the result of a product.

    The share of the bandwidth rises from that of small transfers to that of large ones.
    """
    table = device.products
    slow = nbytes * table.memory_ramp / (nbytes + table.memory_ramp) if nbytes else 0.0
    rest = (nbytes - slow) / table.memory
    return (slow / table.memory_small + rest) / device.memory_bandwidth


def _alignment(gemm: Gemm, dtype: str) -> int:
    """Returns the largest power of two of bytes that divides the rows of a product."""
    size = {"tf32": 4, "f8": 1}.get(dtype) or DTYPE_BYTES[dtype]
    return (gemm.rows & -gemm.rows) * size


def gemm_seconds(device: Device, gemm: Gemm, dtype: str) -> float:
    """Returns the computing seconds of matrix products at full clocks, if memory keeps up."""
    if not gemm.flops:
        return 0.0
    table, rate = device.products, device.rate(dtype, matmul=True)
    peak = rate * table.efficiency / device.processors
    if rate > device.rate(dtype, matmul=False):  # on matrix units
        peak *= _UNALIGNED.get(_alignment(gemm, dtype), 1.0)
    # Starts and steps along k take proportionally longer in a slower dtype.
    slower = device.rate("f16", matmul=True) / rate
    start, latency = table.k_half / slower, table.k_latency * slower
    parts = 8.0 * gemm.batch * gemm.m * gemm.n  # written and read in f32 by every split
    parts /= device.memory_bandwidth * table.memory_small
    best = math.inf
    for rows, columns, relative in table.tiles:
        tiles = gemm.batch * -(-gemm.m // rows) * -(-gemm.n // columns)
        term = 2 * rows * columns / (peak * relative)
        for split in _SPLITS:
            waves = -(-tiles * split // device.processors)
            seconds = waves * (start * term + -(-gemm.k // split) * max(term, latency))
            if split > 1:
                seconds += split * parts + table.split
            best = min(best, seconds)
            if tiles * split >= device.processors:
                break
    return best

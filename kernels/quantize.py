"""Quantised collectives: one byte per value, with a scale for every group of them.

    scale = max |x| / largest,    q = round(x / scale),    x ≈ q scale

ZeRO++ (arXiv:2306.10209, sections 3.1 and 3.3) sends weights and gradients this way: an all_to_all
moves quantised blocks, and the receiver converts them to float32 and adds them in one pass, in
fixed order. A group with a value that is not finite has a scale of NaN, so that no overflow is
lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import architecture, blocks, jit, tl
from .registry.launch import launch
from .registry.operator import Args, Operator, contiguous, sums_of, wider

Pair = tuple[Tensor, Tensor]
F8 = torch.float8_e4m3fn
_LARGEST = {torch.int8: 127.0, F8: 448.0}


@jit
def _quantize_kernel(
    x: tl.tensor,
    q: tl.tensor,
    scales: tl.tensor,
    n: tl.tensor,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Handles some groups; the values of a group are one row."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < n
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(value), axis=1)
    odd = tl.sum(value * 0.0, axis=1)  # NaN where a value is not finite
    inverse = tl.where(top == 0.0, 1.0, LARGEST / top)
    tl.store(scales + group, tl.where(top == 0.0, 1.0, top / LARGEST) + odd, mask=group * GROUP < n)
    value = value * (inverse + odd)[:, None]
    value = tl.where(value == value, value, 0.0)
    if ROUND:
        value = tl.floor(value + 0.5)
    tl.store(q + at, value.to(q.dtype.element_ty), mask=mask)


@jit
def _reduce_kernel(
    q: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    groups: tl.tensor,
    scale: tl.tensor,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < n
    total = tl.zeros([GROUPS, GROUP], tl.float32)
    for _ in tl.static_range(PARTS):
        own = tl.load(scales + group, mask=group < groups, other=0.0)
        total += tl.load(q + at, mask=mask, other=0.0).to(tl.float32) * own[:, None]
        q += n
        scales += groups
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=mask)


def reference(
    x: Tensor, group: int, *, dtype: torch.dtype, wide: torch.dtype = torch.float32
) -> Pair:
    """Returns q, of `dtype`, shaped like x, and scales, one per group of consecutive elements."""
    n, count = x.numel(), blocks(x.numel(), group)
    padded = torch.nn.functional.pad(wider(x, wide).reshape(-1), (0, count * group - n))
    value = padded.view(count, group)
    top = value.abs().amax(1)
    odd = (value * 0).sum(1)
    # A tensor, since torch divides a number by one in two roundings: times the reciprocal.
    largest = top.new_full((), _LARGEST[dtype])
    inverse = torch.where(top == 0, 1.0, largest / top) + odd
    scales = torch.where(top == 0, 1.0, top / largest) + odd
    value = (value * inverse.unsqueeze(1)).nan_to_num()
    value = (value + 0.5).floor() if dtype == torch.int8 else value
    # f8 is rounded from f32, as in hardware.
    q = value.float().to(dtype).view(-1)[:n].view(x.shape)
    return q, scales.to(sums_of(x))


def reduce_reference(
    q: Tensor,
    scales: Tensor,
    group: int,
    scale: float,
    dtype: torch.dtype,
    *,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    """Returns scale times the sum over parts of q times its groups' scales; (n,), in `dtype`."""
    parts, n = q.shape
    each = wider(scales, wide).repeat_interleave(group, 1)[:, :n]
    total = each.new_zeros(n)
    for part in range(parts):
        total = total + q[part].to(each.dtype) * each[part]
    return (total * scale).to(dtype)


def _allocate(x: Tensor, group: int, *, dtype: torch.dtype) -> Pair:
    wide = sums_of(x)
    q = x.new_empty(x.shape, dtype=dtype)
    return q, x.new_empty(blocks(x.numel(), group), dtype=wide)


def _allocate_int8(x: Tensor, group: int) -> Pair:
    return _allocate(x, group, dtype=torch.int8)


def _allocate_f8(x: Tensor, group: int) -> Pair:
    return _allocate(x, group, dtype=F8)


def _launch(results: Pair, x: Tensor, group: int) -> None:
    q, scales = results
    row = launch("quantize", x.numel())
    each = max(1, row.block // group)
    _quantize_kernel[(blocks(scales.numel(), each),)](
        *(x, q, scales, x.numel()),
        LARGEST=_LARGEST[q.dtype],
        ROUND=q.dtype == torch.int8,
        GROUP=group,
        GROUPS=each,
        **row.options,
    )


def _allocate_reduce(
    q: Tensor, scales: Tensor, group: int, scale: float, dtype: torch.dtype
) -> Tensor:
    return q.new_empty(q.shape[1], dtype=dtype)


def _launch_reduce(
    out: Tensor, q: Tensor, scales: Tensor, group: int, scale: float, dtype: torch.dtype
) -> None:
    parts, n = q.shape
    row = launch("dequantize_reduce", n)
    each = max(1, row.block // group)
    _reduce_kernel[(blocks(scales.shape[1], each),)](
        *(q, scales, out, n, scales.shape[1], float(scale)),
        PARTS=parts,
        GROUP=group,
        GROUPS=each,
        **row.options,
    )


def _grouped(group: int) -> str:
    """Requires a power of two, as Triton's blocks do."""
    return f"groups of {group}, not a power of two" if group & (group - 1) or group <= 0 else ""


def _fits(x: Tensor, group: int, *, dtype: torch.dtype) -> str:
    if dtype == F8 and architecture() in ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87"):
        return f"f8 on {architecture()}, which lacks it"
    return _grouped(group) or contiguous(x=x)


def _fits_reduce(q: Tensor, scales: Tensor, group: int, scale: float, dtype: torch.dtype) -> str:
    if q.dtype == F8 and _fits(scales, group, dtype=F8):
        return _fits(scales, group, dtype=F8)
    return _grouped(group) or contiguous(q=q, scales=scales)


def _samples(draw: Draw) -> Iterable[Args]:
    x = draw.normal(3, 123)
    x[0, :32] = 0
    yield x, 32
    x = draw.normal(150, scale=30.0)
    x[40] = float("nan")
    yield x, 64


def _reduce_samples(draw: Draw) -> Iterable[Args]:
    for dtype, out in ((torch.int8, torch.float32), (F8, torch.bfloat16)):
        x = [draw.normal(369, scale=scale) for scale in (1.0, 30.0, 0.1)]
        made = [reference(each, 32, dtype=dtype) for each in x]
        scales = torch.stack([scale for _, scale in made])
        yield torch.stack([q for q, _ in made]), scales, 32, 0.5, out


def _typical(draw: Draw, n: int) -> Args:
    return draw.normal(n or 1 << 26), 256


def _typical_reduce(draw: Draw, n: int) -> Args:
    n = n or 1 << 24
    scales = draw.positive(8, n // 256, dtype=torch.float32)
    return draw.integers(127, 8, n, dtype=torch.int8), scales, 256, 1.0, torch.bfloat16


def _quantize(name: str, dtype: torch.dtype) -> Operator:
    return Operator(
        name=name,
        allocate=_allocate_f8 if dtype == F8 else _allocate_int8,
        launch=_launch,
        reference=partial(reference, dtype=dtype),
        factors="... -> ..., g!",
        flops="5 ...",
        samples=_samples,
        typical=_typical,
        table="quantize",
        fits=partial(_fits, dtype=dtype),
    )


OPERATORS = (
    _quantize("quantize_int8", torch.int8),
    _quantize("quantize_f8", F8),
    Operator(
        name="dequantize_reduce",
        allocate=_allocate_reduce,
        launch=_launch_reduce,
        reference=reduce_reference,
        factors="p! n!, p! g! -> n!",
        flops="2 p n",
        samples=_reduce_samples,
        typical=_typical_reduce,
        table="dequantize_reduce",
        dtypes=(torch.float32, F8),
        fits=_fits_reduce,
    ),
)

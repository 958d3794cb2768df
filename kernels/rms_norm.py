"""RMS normalisation, with the preceding residual addition.

    h = x + residual,    y = h rstd weight,    rstd = (mean h² + eps)^(-1/2)

(Zhang & Sennrich, arXiv:1910.07467, equation 4.) The stored, rounded h is normalised, so that the
backward reads exactly what the forward used. With x̂ = h rstd and g = dy weight,

    dx = rstd (g - x̂ mean(g x̂)) + dh,    dweight = sum over rows of dy x̂

Each row is processed by one program, whole in registers. Backwards a program processes many rows
and keeps its part of dweight in registers; the parts are added afterwards, in fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import jit, power_of_2, processors, tl
from .registry.launch import launch
from .registry.operator import (
    Args,
    Gradient,
    Operator,
    contiguous,
    evenly_spaced,
    row_stride,
    sums_of,
    wider,
)

# Most elements of a row that fit a program's registers, forwards and backwards.
LONGEST, LONGEST_BACKWARD = 32768, 8192
Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@jit
def _forward_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    rstd: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    value = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=mask, other=0.0)
        rounded = value.to(h.dtype.element_ty)
        tl.store(h + row * n + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / n + eps)
    tl.store(rstd + row, scale)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * n + column, (value * scale * w).to(y.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dy: tl.tensor,
    dh: tl.tensor,
    h: tl.tensor,
    weight: tl.tensor,
    rstd: tl.tensor,
    dx: tl.tensor,
    dweight: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    ADD: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < n
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(row, tl.int64) * n + column
        given = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        held = tl.load(h + tl.cast(row, tl.int64) * stride + column, mask=mask, other=0.0)
        scale = tl.load(rstd + row)
        normal = held.to(tl.float32) * scale
        total += given * normal
        g = given * w
        d = scale * (g - normal * (tl.sum(g * normal, axis=0) / n))
        if ADD:
            d += tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    tl.store(dweight + program.to(tl.int64) * n + column, total, mask=mask)


def reference(x: Tensor, weight: Tensor, eps: float, *, wide: torch.dtype = torch.float32) -> Pair:
    """Returns y, in x's dtype, and rstd, in `wide` or x's dtype if that is more precise."""
    value = wider(x, wide)
    rstd = (value.square().mean(-1) + eps).rsqrt()
    y = value * rstd.unsqueeze(-1) * wider(weight, wide)
    return y.to(x.dtype), rstd.to(sums_of(x))


def add_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, wide: torch.dtype = torch.float32
) -> Triple:
    """Returns y and h, in x's dtype, and rstd."""
    h = (wider(x, torch.float32) + residual).to(x.dtype)
    y, rstd = reference(h, weight, eps, wide=wide)
    return y, h, rstd


def backward_reference(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    wide: torch.dtype = torch.float32,
) -> Pair:
    """Returns (dx, dweight), in the dtypes of h and of weight."""
    given, scale = wider(dy, wide), wider(rstd, wide).unsqueeze(-1)
    normal = wider(h, wide) * scale
    g = given * wider(weight, wide)
    dx = scale * (g - normal * (g * normal).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + dh
    dweight = (given * normal).reshape(-1, h.shape[-1]).sum(0)
    return dx.to(h.dtype), dweight.to(weight.dtype)


def _allocate(x: Tensor, weight: Tensor, eps: float) -> Pair:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=sums_of(x))


def _allocate_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Triple:
    y, rstd = _allocate(x, weight, eps)
    return y, torch.empty_like(y), rstd


def _allocate_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> Pair:
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(weight)


def _launch(results: Pair, x: Tensor, weight: Tensor, eps: float) -> None:
    y, rstd = results
    _launch_add((y, y, rstd), x, None, weight, eps)


def _launch_add(
    results: Triple, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> None:
    n = x.shape[-1]
    added = x if residual is None else residual
    _forward_kernel[(x.numel() // n,)](
        *(x, added, weight, *results, row_stride(x), row_stride(added), n, float(eps)),
        ADD=residual is not None,
        BLOCK=power_of_2(n),
        **launch("rms_norm", n).options,
    )


def _launch_backward(
    results: Pair, dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> None:
    dx, dweight = results
    n = h.shape[-1]
    rows = h.numel() // n
    row = launch("rms_norm_backward", n)
    programs = min(rows, row.programs * processors(h))
    parts = h.new_empty((programs, n), dtype=torch.float32)
    _backward_kernel[(programs,)](
        *(dy, dy if dh is None else dh, h, weight, rstd, dx, parts, row_stride(h), rows, n),
        ADD=dh is not None,
        STAGES=row.stages,
        BLOCK=power_of_2(n),
        **row.options,
    )
    dweight.copy_(parts.sum(0))


def _fits(x: Tensor, *rest: Any) -> str:
    """Requires a contiguous weight; rows of x and of a residual may have gaps."""
    if x.shape[-1] > LONGEST:
        return f"rows of {x.shape[-1]} elements, more than {LONGEST}"
    *more, weight, _ = rest
    return evenly_spaced(x=x, residual=more[0] if more else None) or contiguous(weight=weight)


def _fits_backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> str:
    if h.shape[-1] > LONGEST_BACKWARD:
        return f"rows of {h.shape[-1]} elements, more than {LONGEST_BACKWARD}"
    return evenly_spaced(h=h) or contiguous(dy=dy, dh=dh, weight=weight, rstd=rstd)


def _setup(ctx: Any, inputs: Args, output: Pair) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    dx, dweight = BACKWARD(dy.contiguous(), None, *ctx.saved_tensors)
    return dx, dweight, None


def _setup_add(ctx: Any, inputs: Args, output: Triple) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate_add(
    ctx: Any, dy: Tensor | None, dh: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return dh, dh, None, None
    dh = None if dh is None else dh.contiguous()
    dx, dweight = BACKWARD(dy.contiguous(), dh, *ctx.saved_tensors)
    return dx, dx, dweight, None


def _samples(draw: Draw) -> Iterable[Args]:
    # A large eps detects its misplacement in the formula.
    yield draw.normal(2, 3, 100), draw.normal(100), 0.3
    yield draw.normal(5, 128)[:, :64], draw.normal(64), 1e-6


def _add_samples(draw: Draw) -> Iterable[Args]:
    yield draw.normal(2, 3, 100), draw.normal(2, 3, 100), draw.normal(100), 0.3
    yield draw.normal(5, 128)[:, 64:], draw.normal(5, 80)[:, :64], draw.normal(64), 1e-6


def _backward_samples(draw: Draw) -> Iterable[Args]:
    for given, n in ((True, 100), (False, 64)):
        dy, dh, h = (draw.normal(7, n) for _ in range(3))
        rstd = draw.positive(7, dtype=sums_of(h))
        yield dy, dh if given else None, h, draw.normal(n), rstd


def _typical(draw: Draw, n: int) -> Args:
    n = n or 4096
    return draw.normal(8192, n), draw.normal(8192, n), draw.normal(n), 1e-6


def _typical_backward(draw: Draw, n: int) -> Args:
    x, residual, weight, _ = _typical(draw, n)
    dh = draw.normal(*x.shape)
    return x, dh, residual, weight, draw.positive(x.shape[0], dtype=torch.float32)


BACKWARD = Operator(
    name="rms_norm_backward",
    allocate=_allocate_backward,
    launch=_launch_backward,
    reference=backward_reference,
    factors="... n!, ... n!, ... n!, n!, ... -> ... n!, n!",
    flops="10 ... n",
    samples=_backward_samples,
    typical=_typical_backward,
    table="rms_norm_backward",
    fits=_fits_backward,
)
FORWARD = Operator(
    name="rms_norm",
    allocate=_allocate,
    launch=_launch,
    reference=reference,
    factors="... n!, n! -> ... n!, ...",
    flops="4 ... n",
    samples=_samples,
    typical=lambda draw, n: (_typical(draw, n)[0], *_typical(draw, n)[2:]),
    table="rms_norm",
    fits=_fits,
    gradient=Gradient(_setup, _differentiate),
    examples=("f64[4, 6, 8], f64[8], 0.3",),
)
ADD = Operator(
    name="add_rms_norm",
    allocate=_allocate_add,
    launch=_launch_add,
    reference=add_reference,
    factors="... n!, ... n!, n! -> ... n!, ... n!, ...",
    flops="5 ... n",
    samples=_add_samples,
    typical=_typical,
    table="rms_norm",
    fits=_fits,
    gradient=Gradient(_setup_add, _differentiate_add),
    examples=("f64[4, 6, 8], f64[4, 6, 8], f64[8], 0.3",),
)
OPERATORS = (FORWARD, ADD, BACKWARD)

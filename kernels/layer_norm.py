"""Layer normalisation, with the preceding residual addition.

    h = x + residual,    x̂ = (h - mean) rstd,    y = x̂ weight + bias

(Ba, Kiros & Hinton, arXiv:1607.06450, section 3.) The variance is computed from the deviations from
the mean, since a whole row is in registers. With g = dy weight,

    dx = rstd (g - mean(g) - x̂ mean(g x̂)) + dh,    dweight = sum dy x̂,    dbias = sum dy

Programs that process many rows keep their parts of dweight and dbias in registers; the parts are
added afterwards in fixed order.
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
LONGEST, LONGEST_BACKWARD = 16384, 8192
Triple = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


@jit
def _forward_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    mean: tl.tensor,
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
    middle = tl.sum(value, axis=0) / n
    value = tl.where(mask, value - middle, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / n + eps)
    tl.store(mean + row, middle)
    tl.store(rstd + row, scale)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * n + column, (value * scale * w + b).to(y.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dy: tl.tensor,
    dh: tl.tensor,
    h: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
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
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(row, tl.int64) * n + column
        given = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        held = tl.load(h + tl.cast(row, tl.int64) * stride + column, mask=mask, other=0.0)
        scale = tl.load(rstd + row)
        normal = (held.to(tl.float32) - tl.load(mean + row)) * scale
        dweight += given * normal
        dbias += given
        g = given * w  # zero beyond the row
        d = g - tl.sum(g, axis=0) / n - normal * (tl.sum(g * normal, axis=0) / n)
        d = d * scale
        if ADD:
            d += tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    at = program.to(tl.int64) * 2 * n + column
    tl.store(parts + at, dweight, mask=mask)
    tl.store(parts + at + n, dbias, mask=mask)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, wide: torch.dtype = torch.float32
) -> Triple:
    """Returns y, in x's dtype, and the mean and rstd of each row."""
    value = wider(x, wide)
    mean = value.mean(-1, keepdim=True)
    rstd = ((value - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (value - mean) * rstd * wider(weight, wide) + wider(bias, wide)
    dtype = sums_of(x)
    return y.to(x.dtype), mean.squeeze(-1).to(dtype), rstd.squeeze(-1).to(dtype)


def add_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    wide: torch.dtype = torch.float32,
) -> Four:
    """Returns y and h, in x's dtype, and the mean and rstd of each row of h."""
    h = (wider(x, torch.float32) + residual).to(x.dtype)
    y, mean, rstd = reference(h, weight, bias, eps, wide=wide)
    return y, h, mean, rstd


def backward_reference(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    wide: torch.dtype = torch.float32,
) -> Triple:
    """Returns (dx, dweight, dbias), in the dtypes of h and of weight."""
    given, scale = wider(dy, wide), wider(rstd, wide).unsqueeze(-1)
    normal = (wider(h, wide) - wider(mean, wide).unsqueeze(-1)) * scale
    g = given * wider(weight, wide)
    dx = g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True)
    dx = dx * scale if dh is None else dx * scale + dh
    n = h.shape[-1]
    dweight, dbias = (given * normal).reshape(-1, n).sum(0), given.reshape(-1, n).sum(0)
    return dx.to(h.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _allocate(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Triple:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = x.new_empty(x.shape[:-1], dtype=sums_of(x))
    return y, mean, torch.empty_like(mean)


def _allocate_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Four:
    y, mean, rstd = _allocate(x, weight, bias, eps)
    return y, torch.empty_like(y), mean, rstd


def _allocate_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> Triple:
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(weight), torch.empty_like(weight)


def _launch(results: Triple, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    y, mean, rstd = results
    _launch_add((y, y, mean, rstd), x, None, weight, bias, eps)


def _launch_add(
    results: Four, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> None:
    n = x.shape[-1]
    added = x if residual is None else residual
    _forward_kernel[(x.numel() // n,)](
        *(x, added, weight, bias, *results, row_stride(x), row_stride(added), n, float(eps)),
        ADD=residual is not None,
        BLOCK=power_of_2(n),
        **launch("layer_norm", n).options,
    )


def _launch_backward(
    results: Triple,
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    dx, dweight, dbias = results
    n = h.shape[-1]
    rows = h.numel() // n
    row = launch("layer_norm_backward", n)
    programs = min(rows, row.programs * processors(h))
    parts = h.new_empty((programs, 2, n), dtype=torch.float32)
    added = dy if dh is None else dh
    _backward_kernel[(programs,)](
        *(dy, added, h, weight, mean, rstd, dx, parts, row_stride(h), rows, n),
        ADD=dh is not None,
        STAGES=row.stages,
        BLOCK=power_of_2(n),
        **row.options,
    )
    total = parts.sum(0)
    dweight.copy_(total[0])
    dbias.copy_(total[1])


def _fits(x: Tensor, *rest: Any) -> str:
    """Requires a contiguous weight and bias; rows of x and of a residual may have gaps."""
    if x.shape[-1] > LONGEST:
        return f"rows of {x.shape[-1]} elements, more than {LONGEST}"
    *more, weight, bias, _ = rest
    apart = evenly_spaced(x=x, residual=more[0] if more else None)
    return apart or contiguous(weight=weight, bias=bias)


def _fits_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> str:
    if h.shape[-1] > LONGEST_BACKWARD:
        return f"rows of {h.shape[-1]} elements, more than {LONGEST_BACKWARD}"
    return evenly_spaced(h=h) or contiguous(dy=dy, dh=dh, weight=weight, mean=mean, rstd=rstd)


def _setup(ctx: Any, inputs: Args, output: Triple) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, *rest: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    return *BACKWARD(dy.contiguous(), None, *ctx.saved_tensors), None


def _setup_add(ctx: Any, inputs: Args, output: Four) -> None:
    _, h, mean, rstd = output
    ctx.save_for_backward(h, inputs[2], mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate_add(
    ctx: Any, dy: Tensor | None, dh: Tensor | None, *rest: None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return dh, dh, None, None, None
    dh = None if dh is None else dh.contiguous()
    dx, dweight, dbias = BACKWARD(dy.contiguous(), dh, *ctx.saved_tensors)
    return dx, dx, dweight, dbias, None


def _samples(draw: Draw) -> Iterable[Args]:
    # A large eps detects its misplacement in the formula, a mean far from 0 how deviations are
    # taken.
    yield draw.normal(2, 3, 100) + 4, draw.normal(100), draw.normal(100), 0.3
    yield draw.normal(5, 128)[:, :64], draw.normal(64), draw.normal(64), 1e-6


def _add_samples(draw: Draw) -> Iterable[Args]:
    more = draw.normal(100), draw.normal(100), 0.3
    yield draw.normal(2, 3, 100), draw.normal(2, 3, 100) + 4, *more
    more = draw.normal(64), draw.normal(64), 1e-6
    yield draw.normal(5, 128)[:, 64:], draw.normal(5, 80)[:, :64], *more


def _backward_samples(draw: Draw) -> Iterable[Args]:
    for given, n in ((True, 100), (False, 64)):
        dy, dh, h = (draw.normal(7, n) for _ in range(3))
        mean = draw.normal(7, dtype=sums_of(h))
        rstd = draw.positive(7, dtype=sums_of(h))
        yield dy, dh if given else None, h, draw.normal(n), mean, rstd


def _typical(draw: Draw, n: int) -> Args:
    n = n or 4096
    return draw.normal(8192, n), draw.normal(8192, n), draw.normal(n), draw.normal(n), 1e-5


def _typical_backward(draw: Draw, n: int) -> Args:
    x, residual, weight, *_ = _typical(draw, n)
    rstd = draw.positive(x.shape[0], dtype=torch.float32)
    return x, draw.normal(*x.shape), residual, weight, rstd, rstd


BACKWARD = Operator(
    name="layer_norm_backward",
    allocate=_allocate_backward,
    launch=_launch_backward,
    reference=backward_reference,
    factors="... n!, ... n!, ... n!, n!, ..., ... -> ... n!, n!, n!",
    flops="14 ... n",
    samples=_backward_samples,
    typical=_typical_backward,
    table="layer_norm_backward",
    fits=_fits_backward,
)
FORWARD = Operator(
    name="layer_norm",
    allocate=_allocate,
    launch=_launch,
    reference=reference,
    factors="... n!, n!, n! -> ... n!, ..., ...",
    flops="7 ... n",
    samples=_samples,
    typical=lambda draw, n: (_typical(draw, n)[0], *_typical(draw, n)[2:]),
    table="layer_norm",
    fits=_fits,
    gradient=Gradient(_setup, _differentiate),
    examples=("f64[4, 6, 8], f64[8], f64[8], 0.3",),
)
ADD = Operator(
    name="add_layer_norm",
    allocate=_allocate_add,
    launch=_launch_add,
    reference=add_reference,
    factors="... n!, ... n!, n!, n! -> ... n!, ... n!, ..., ...",
    flops="8 ... n",
    samples=_add_samples,
    typical=_typical,
    table="layer_norm",
    fits=_fits,
    gradient=Gradient(_setup_add, _differentiate_add),
    examples=("f64[4, 6, 8], f64[4, 6, 8], f64[8], f64[8], 0.3",),
)
OPERATORS = (FORWARD, ADD, BACKWARD)

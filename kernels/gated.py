"""Gated activations: act(gate) up, and their gradients.

    swiglu   act(x) = x σ(x)                                (Shazeer, arXiv:2002.05202)
    geglu    act(x) = x σ(2u), u = sqrt(2/π) (x + 0.044715 x³)

The second is the tanh form of GELU (arXiv:1606.08415, section 2), by (1 + tanh u) / 2 = σ(2u). Gate
and up may be halves of one projection, so their rows may have gaps. The backward recomputes the
forward's result where it is needed, so that `swiglu_linear` saves the two projections and not their
product.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, tl
from .registry.launch import launch
from .registry.operator import Args, Gradient, Operator, evenly_spaced, row_stride, wider

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@jit
def _forward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    n: tl.tensor,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        active = g * tl.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))
    else:
        active = g * tl.sigmoid(g)
    tl.store(out + row * n + column, (active * u).to(out.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dout: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    dgate: tl.tensor,
    dup: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    n: tl.tensor,
    GELU: tl.constexpr,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dout + row * n + column, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        open = tl.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    else:
        open = tl.sigmoid(g)
        slope = 1.0
    active = g * open
    change = open + active * (1.0 - open) * slope
    tl.store(dgate + row * n + column, (d * u * change).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + row * n + column, (d * active).to(dup.dtype.element_ty), mask=mask)
    if AGAIN:
        tl.store(out + row * n + column, (active * u).to(out.dtype.element_ty), mask=mask)


def _parts(gate: Tensor, gelu: bool, wide: torch.dtype) -> Pair:
    """Returns the activation of the gate and its derivative."""
    g = wider(gate, wide)
    cubic = 2 * (2 / torch.pi) ** 0.5 if gelu else 1.0
    open = torch.sigmoid(cubic * (g + 0.044715 * g**3) if gelu else g)
    slope = cubic * (1 + 3 * 0.044715 * g**2) if gelu else 1.0
    return g * open, open + g * open * (1 - open) * slope


def reference(gate: Tensor, up: Tensor, *, gelu: bool, wide: torch.dtype = torch.float32) -> Tensor:
    """Returns act(gate) up, in gate's dtype."""
    active, _ = _parts(gate, gelu, wide)
    return (active * wider(up, wide)).to(gate.dtype)


def again_reference(
    dout: Tensor, gate: Tensor, up: Tensor, *, gelu: bool, wide: torch.dtype = torch.float32
) -> Triple:
    """Returns (dgate, dup, act(gate) up)."""
    active, change = _parts(gate, gelu, wide)
    d, u = wider(dout, wide), wider(up, wide)
    return (d * u * change).to(gate.dtype), (d * active).to(up.dtype), (active * u).to(gate.dtype)


def backward_reference(
    dout: Tensor, gate: Tensor, up: Tensor, *, gelu: bool, wide: torch.dtype = torch.float32
) -> Pair:
    """Returns (dgate, dup)."""
    return again_reference(dout, gate, up, gelu=gelu, wide=wide)[:2]


def _allocate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _allocate_backward(dout: Tensor, gate: Tensor, up: Tensor) -> Pair:
    return _allocate(gate, up), _allocate(up, gate)


def _allocate_again(dout: Tensor, gate: Tensor, up: Tensor) -> Triple:
    return _allocate(gate, up), _allocate(up, gate), _allocate(gate, up)


def _launch(out: Tensor, gate: Tensor, up: Tensor, *, gelu: bool) -> None:
    n = gate.shape[-1]
    row = launch("gated", n)
    _forward_kernel[(gate.numel() // n, blocks(n, row.block))](
        *(gate, up, out, row_stride(gate), row_stride(up), n),
        GELU=gelu,
        BLOCK=row.block,
        **row.options,
    )


def _launch_backward(
    results: tuple[Tensor, ...], dout: Tensor, gate: Tensor, up: Tensor, *, gelu: bool
) -> None:
    n = gate.shape[-1]
    row = launch("gated_backward", n)
    _backward_kernel[(gate.numel() // n, blocks(n, row.block))](
        *(dout, gate, up, *results[:2], results[-1], row_stride(gate), row_stride(up), n),
        GELU=gelu,
        AGAIN=len(results) == 3,
        BLOCK=row.block,
        **row.options,
    )


def _fits_backward(dout: Tensor, gate: Tensor, up: Tensor) -> str:
    if not dout.is_contiguous():
        return f"dout with strides {tuple(dout.stride())}"
    return evenly_spaced(gate=gate, up=up)


def _setup(ctx: Any, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor, *, backward: Operator) -> Pair:
    gradients: Pair = backward(dout.contiguous(), *ctx.saved_tensors)
    return gradients


def linear_reference(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    *,
    gelu: bool,
    forward: Operator,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    """Returns act(gate) up weightᵀ."""
    out: Tensor = forward.run(gate, up)
    return out @ weight.T


def _allocate_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], weight.shape[0]))


def _differentiate_linear(ctx: Any, dy: Tensor, *, again: Operator) -> Triple:
    gate, up, weight = ctx.saved_tensors
    dgate, dup, out = again((dy @ weight).contiguous(), gate, up)
    dweight = dy.flatten(0, -2).T @ out.flatten(0, -2)
    return dgate, dup, dweight


def _samples(draw: Draw) -> Iterable[Args]:
    yield draw.normal(2, 3, 100), draw.normal(2, 3, 100)
    packed = draw.normal(2, 3, 144)
    yield packed[..., :72], packed[..., 72:]


def _backward_samples(draw: Draw) -> Iterable[Args]:
    for gate, up in _samples(draw):
        yield draw.normal(*gate.shape), gate, up


def _linear_samples(draw: Draw) -> Iterable[Args]:
    yield draw.normal(2, 3, 20), draw.normal(2, 3, 20), draw.normal(7, 20)


def _typical(draw: Draw, n: int) -> Args:
    return draw.normal(8192, n or 14336), draw.normal(8192, n or 14336)


def _typical_backward(draw: Draw, n: int) -> Args:
    gate, up = _typical(draw, n)
    return draw.normal(*gate.shape), gate, up


def _typical_linear(draw: Draw, n: int) -> Args:
    return *_typical(draw, n), draw.normal(4096, n or 14336, scale=0.02)


def _family(name: str, *, gelu: bool) -> Iterable[Operator]:
    """Returns the operators of one activation."""
    backward = Operator(
        name=f"{name}_backward",
        allocate=_allocate_backward,
        launch=partial(_launch_backward, gelu=gelu),
        reference=partial(backward_reference, gelu=gelu),
        factors="..., ..., ... -> ..., ...",
        flops="12 ...",
        samples=_backward_samples,
        typical=_typical_backward,
        table="gated_backward",
        fits=_fits_backward,
    )
    again = Operator(
        name=f"{name}_again",
        allocate=_allocate_again,
        launch=partial(_launch_backward, gelu=gelu),
        reference=partial(again_reference, gelu=gelu),
        factors="..., ..., ... -> ..., ..., ...",
        flops="13 ...",
        samples=_backward_samples,
        typical=_typical_backward,
        table="gated_backward",
        fits=_fits_backward,
    )
    forward = Operator(
        name=name,
        allocate=_allocate,
        launch=partial(_launch, gelu=gelu),
        reference=partial(reference, gelu=gelu),
        factors="..., ... -> ...",
        flops="7 ...",
        samples=_samples,
        typical=_typical,
        table="gated",
        fits=lambda gate, up: evenly_spaced(gate=gate, up=up),
        gradient=Gradient(_setup, partial(_differentiate, backward=backward)),
        examples=("f64[4, 6, 8], f64[4, 6, 8]",),
    )
    linear = Operator(
        name=f"{name}_linear",
        allocate=_allocate_linear,
        launch=lambda *args: None,
        reference=partial(linear_reference, gelu=gelu, forward=forward),
        factors="... f, ... f, n f -> ... n",
        flops="2 ... n f + 7 ... f",
        samples=_linear_samples,
        typical=_typical_linear,
        table="",
        gradient=Gradient(_setup, partial(_differentiate_linear, again=again)),
        examples=("f64[4, 6, 8], f64[4, 6, 8], f64[6, 8]",),
    )
    return forward, backward, again, linear


OPERATORS = (*_family("swiglu", gelu=False), *_family("geglu", gelu=True))

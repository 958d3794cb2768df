"""Rotary position embedding, written in the layout that an all_to_all sends.

    y1 = x1 cos - x2 sin,    y2 = x2 cos + x1 sin        for the halves x1, x2 of each head

(Su et al., arXiv:2104.09864, equation 34, with halves in place of neighbours, as in Llama.) Under
DeepSpeed-Ulysses (arXiv:2309.14509) each device has all heads of a part of the sequence and, for
attention, exchanges them for some heads of all of it. `rotary_pack` writes q and k, rotated, and v
in the order in which the exchange sends them:

    (part, sequence, batch, heads of the part, width)

Attention reads the received tensor as (whole sequence, batch, heads, width) without another
permutation. `rotary_unpack` is the inverse and, since the rotation is orthogonal, the gradient.
Without k and v both handle a single rotated tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, power_of_2, tl
from .registry.launch import launch
from .registry.operator import Args, Gradient, Operator, wider

Triple = tuple[Tensor, Tensor, Tensor]


@jit
def _kernel(
    source: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    batch_stride: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    out_part: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    table_stride: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    half: tl.tensor,
    sign: tl.tensor,
    PER_PART: tl.constexpr,
    ROTATE: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Moves some rows of a head: (batch, row, head) to (part, batch, row, head in the part)."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, HALF)
    mask = (row < rows)[:, None] & (column < half)[None, :]
    whole = batch * batch_stride + row * row_stride + head.to(tl.int64) * head_stride
    part = (head // PER_PART).to(tl.int64) * out_part
    packed = part + batch * out_batch + row * out_row + (head % PER_PART) * out_head
    if INVERSE:
        read, write = packed, whole
    else:
        read, write = whole, packed
    at = source + read[:, None] + column[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        angle = row[:, None] * table_stride + column[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32) * sign
        first, second = first * c - second * s, second * c + first * s
    to = out + write[:, None] + column[None, :]
    tl.store(to, first.to(out.dtype.element_ty), mask=mask)
    tl.store(to + half, second.to(out.dtype.element_ty), mask=mask)


def _run(
    whole: Tensor, packed: Tensor, cos: Tensor, sin: Tensor, *, rotate: bool, inverse: bool
) -> None:
    """Moves x (batch, row, head, width) to `packed` (part, row, batch, head, width), or back.

    `packed` may be some of the heads of a larger tensor.
    """
    batch, rows, heads, width = whole.shape
    if not heads:
        return
    row = launch("rotary", width)
    part, out_row, out_batch, out_head, _ = packed.stride()
    source, out = (packed, whole) if inverse else (whole, packed)
    _kernel[(blocks(rows, row.block), batch * heads)](
        *(source, cos, sin, out, *whole.stride()[:3], part, out_batch, out_row, out_head),
        *(cos.stride(0), rows, heads, width // 2, -1.0 if inverse else 1.0),
        PER_PART=packed.shape[3],
        ROTATE=rotate,
        INVERSE=inverse,
        ROWS=row.block,
        HALF=power_of_2(width // 2),
        **row.options,
    )


def reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, wide: torch.dtype = torch.float32, sign: float = 1.0
) -> Tensor:
    """Returns x, (batch, row, head, width), rotated."""
    half = x.shape[-1] // 2
    first, second = wider(x, wide).split(half, -1)
    c, s = (wider(t[:, :half], wide).unsqueeze(1) for t in (cos, sin * sign))
    return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)


def back_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, wide: torch.dtype = torch.float32
) -> Tensor:
    """Returns x rotated the other way."""
    return reference(x, cos, sin, wide=wide, sign=-1.0)


def pack_reference(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    parts: int,
    *,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    """Returns (part, row, batch, heads of q, k and v in the part, width)."""
    turned = [reference(x, cos, sin, wide=wide) for x in (q, k) if x is not None]
    turned += [] if v is None else [v]
    split = [x.permute(1, 0, 2, 3).unflatten(2, (parts, -1)).movedim(2, 0) for x in turned]
    return torch.cat(split, 3)


def unpack_reference(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    kv_heads: int,
    *,
    wide: torch.dtype = torch.float32,
) -> Triple:
    """Returns (q, k, v), rotated back."""
    each = [heads // packed.shape[0] for heads in (q_heads, kv_heads, kv_heads)]
    q, k, v = (
        x.movedim(0, 2).flatten(2, 3).permute(1, 0, 2, 3).contiguous()
        for x in packed.split(each, 3)
    )
    back = back_reference(q, cos, sin, wide=wide), back_reference(k, cos, sin, wide=wide)
    return *back, v


def _allocate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _run(x, out.transpose(0, 1).unsqueeze(0), cos, sin, rotate=True, inverse=False)


def _launch_back(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _run(out, x.transpose(0, 1).unsqueeze(0), cos, sin, rotate=True, inverse=True)


def _heads(k: Tensor | None) -> int:
    return 0 if k is None else k.shape[2]


def _allocate_pack(
    q: Tensor, k: Tensor | None, v: Tensor | None, cos: Tensor, sin: Tensor, parts: int
) -> Tensor:
    batch, rows, q_heads, width = q.shape
    return q.new_empty((parts, rows, batch, (q_heads + 2 * _heads(k)) // parts, width))


def _launch_pack(
    out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    parts: int,
) -> None:
    given = [x for x in (q, k, v) if x is not None]
    each = [x.shape[2] // parts for x in given]
    for x, place in zip(given, out.split(each, 3), strict=True):
        _run(x, place, cos, sin, rotate=x is not v, inverse=False)


def _allocate_unpack(
    packed: Tensor, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int
) -> Triple:
    _, rows, batch, _, width = packed.shape
    q = packed.new_empty((batch, rows, q_heads, width))
    k = packed.new_empty((batch, rows, kv_heads, width))
    return q, k, torch.empty_like(k)


def _launch_unpack(
    results: Triple, packed: Tensor, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int
) -> None:
    each = [x.shape[2] // packed.shape[0] for x in results]
    for x, place in zip(results, packed.split(each, 3), strict=True):
        _run(x, place, cos, sin, rotate=x is not results[2], inverse=True)


def _wrong_pack(
    q: Tensor, k: Tensor | None, v: Tensor | None, cos: Tensor, sin: Tensor, parts: int
) -> str:
    if (k is None) != (v is None):
        return "pass both k and v, or neither"
    if q.shape[2] % parts == 0 and _heads(k) % parts == 0:
        return ""
    return f"{q.shape[2]} heads of q and {_heads(k)} of k and v do not divide into {parts} parts"


def _wrong_unpack(packed: Tensor, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int) -> str:
    parts, _, _, heads, _ = packed.shape
    if q_heads + 2 * kv_heads == parts * heads and q_heads % parts == kv_heads % parts == 0:
        return ""
    return f"{parts} parts of {heads} heads are not {q_heads} of q and {kv_heads} each of k and v"


def _fits(*args: Any) -> str:
    """Requires even widths, contiguous heads, and equal strides of cos and sin."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    width, (cos, sin) = tensors[0].shape[-1], tensors[-2:]
    if width % 2 or cos.shape[1] < width // 2:
        return f"heads of {width} elements with {cos.shape[1]} angles"
    if cos.stride() != sin.stride():
        return f"cos and sin with strides {tuple(cos.stride())} and {tuple(sin.stride())}"
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            return f"strides {tuple(tensor.stride())}"
    return ""


def _setup(ctx: Any, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    return BACK(d, *ctx.saved_tensors), None, None


def _setup_pack(ctx: Any, inputs: Args, output: Tensor) -> None:
    q, k, _, cos, sin, _ = inputs
    ctx.heads = q.shape[2], _heads(k)
    ctx.save_for_backward(cos, sin)


def _differentiate_pack(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    back = UNPACK(d.contiguous(), *ctx.saved_tensors, *ctx.heads)
    return *(back if ctx.heads[1] else (back[0], None, None)), None, None, None


def _setup_unpack(ctx: Any, inputs: Args, output: Triple) -> None:
    packed, cos, sin, _, _ = inputs
    ctx.parts = packed.shape[0]
    ctx.save_for_backward(cos, sin)


def _differentiate_unpack(ctx: Any, *d: Tensor) -> tuple[Tensor | None, ...]:
    given = d if d[1].shape[2] else (d[0], None, None)
    return PACK(*given, *ctx.saved_tensors, ctx.parts), None, None, None, None


def _angles(draw: Draw, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin as models have them, with equal halves of the width."""
    angle = draw.normal(rows, width // 2, dtype=torch.float32).repeat(1, 2)
    return angle.cos(), angle.sin()


def _samples(draw: Draw) -> Iterable[Args]:
    yield draw.normal(2, 5, 3, 16), *_angles(draw, 5, 16)
    yield draw.normal(2, 3, 5, 12).transpose(1, 2), *_angles(draw, 5, 12)


def _pack_samples(draw: Draw) -> Iterable[Args]:
    q, k, v = draw.normal(2, 5, 4, 16), draw.normal(2, 5, 2, 16), draw.normal(2, 5, 2, 16)
    yield q, k, v, *_angles(draw, 5, 16), 2
    fused = draw.normal(1, 5, 8, 12)
    yield *fused.split([4, 2, 2], 2), *_angles(draw, 5, 12), 1
    yield q, None, None, *_angles(draw, 5, 16), 2


def _unpack_samples(draw: Draw) -> Iterable[Args]:
    yield draw.normal(2, 5, 3, 4, 16), *_angles(draw, 5, 16), 4, 2
    yield draw.normal(2, 5, 3, 2, 16), *_angles(draw, 5, 16), 4, 0


def _typical(draw: Draw, width: int) -> Args:
    width = width or 128
    return draw.normal(2, 4096, 32, width), *_angles(draw, 4096, width)


def _typical_pack(draw: Draw, width: int) -> Args:
    q, cos, sin = _typical(draw, width)
    k = draw.normal(2, 4096, 8, width or 128)
    return q, k, draw.normal(*k.shape), cos, sin, 8


def _typical_unpack(draw: Draw, width: int) -> Args:
    width = width or 128
    return draw.normal(8, 4096, 2, 6, width), *_angles(draw, 4096, width), 32, 8


_ANGLES = "f64[3, 4], f64[3, 4]".replace("f64", "const f64")
BACK = Operator(
    name="rotary_back",
    allocate=_allocate,
    launch=_launch_back,
    reference=back_reference,
    factors="b s h d!, s a!, s a! -> b s h d!",
    flops="3 b s h d",
    samples=_samples,
    typical=_typical,
    table="rotary",
    fits=_fits,
)
FORWARD = Operator(
    name="rotary",
    allocate=_allocate,
    launch=_launch,
    reference=reference,
    factors="b s h d!, s a!, s a! -> b s h d!",
    flops="3 b s h d",
    samples=_samples,
    typical=_typical,
    table="rotary",
    fits=_fits,
    gradient=Gradient(_setup, _differentiate),
    examples=(f"f64[2, 3, 2, 8], {_ANGLES}",),
)
UNPACK = Operator(
    name="rotary_unpack",
    allocate=_allocate_unpack,
    launch=_launch_unpack,
    reference=unpack_reference,
    factors="p! s b h! d!, s a!, s a! -> b s q! d!, b s k! d!, b s k! d!",
    flops="3 p s b h d",
    samples=_unpack_samples,
    typical=_typical_unpack,
    table="rotary",
    wrong=_wrong_unpack,
    fits=_fits,
    gradient=Gradient(_setup_unpack, _differentiate_unpack),
)
PACK = Operator(
    name="rotary_pack",
    allocate=_allocate_pack,
    launch=_launch_pack,
    reference=pack_reference,
    factors="b s q! d!, b s k! d!, b s k! d!, s a!, s a! -> p! s b h! d!",
    flops="3 p s b h d",
    samples=_pack_samples,
    typical=_typical_pack,
    table="rotary",
    wrong=_wrong_pack,
    fits=_fits,
    gradient=Gradient(_setup_pack, _differentiate_pack),
)
OPERATORS = (FORWARD, BACK, PACK, UNPACK)

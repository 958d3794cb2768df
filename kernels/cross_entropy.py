"""Cross entropy of logits whose vocabulary may be split between devices.

    loss = lse - x[target] + z lse²,    lse = log sum exp x

Each device reads its part of a row once and sends three numbers: the largest logit, the sum of
exponentials relative to it, and the target's logit, if it is local. Combined they give the loss
(Megatron-LM, arXiv:1909.08053, section 3, sends as little). The backward only needs the row's lse
on each device (`cross_entropy_backward.py`); a logit moves three times in total. z is the weight of
PaLM's z-loss (arXiv:2204.02311, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .cross_entropy_backward import BACKWARD, IGNORED
from .registry.draw import Draw
from .registry.language import blocks, jit, tl
from .registry.launch import launch
from .registry.operator import (
    Args,
    Gradient,
    Operator,
    evenly_spaced,
    row_stride,
    sums_of,
    wider,
)

_ROWS = 1024  # rows of the typical samples


@jit
def _stats(
    logits: tl.tensor,
    target: tl.tensor,
    stats: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    start: tl.tensor,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes (largest logit, sum of exp(logit - largest), target's logit or 0) of one row.

    Every lane keeps its own maximum and sum over vectors as wide as one load, with one rescaling
    per vector. The textbook form, with one rescaling per element, has too many instructions to keep
    up with an H200's memory.
    """
    row = tl.program_id(0).to(tl.int64)
    LOG2_E: tl.constexpr = 1.4426950408889634
    LANES: tl.constexpr = BLOCK // VECTOR
    largest = tl.full([LANES], -1.0e30, tl.float32)  # finite, so that no difference is NaN
    total = tl.zeros([LANES], tl.float32)
    for block in range(0, tl.cdiv(vocabulary, BLOCK)):
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf"))
        x = tl.reshape(x, [LANES, VECTOR]).to(tl.float32) * LOG2_E
        larger = tl.maximum(largest, tl.max(x, axis=1))
        here = tl.sum(tl.exp2(x - larger[:, None]), axis=1)
        total = total * tl.exp2(largest - larger) + here
        largest = larger
    top = tl.max(largest, axis=0)
    own = tl.load(target + row) - start
    held = (own >= 0) & (own < vocabulary)
    tl.store(stats + row * 3, top / LOG2_E)
    tl.store(stats + row * 3 + 1, tl.sum(total * tl.exp2(largest - top), axis=0))
    found = tl.load(logits + row * stride + own, mask=held, other=0.0)
    tl.store(stats + row * 3 + 2, found.to(tl.float32))


@jit
def _combine(
    stats: tl.tensor,
    target: tl.tensor,
    loss: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    vocabulary: tl.tensor,
    ignored: tl.tensor,
    z_loss: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    largest = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    found = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = stats + (tl.cast(rows, tl.int64) * part + row) * 3
        top = tl.load(at, mask=mask, other=0.0)
        larger = tl.maximum(largest, top)
        here = tl.load(at + 1, mask=mask, other=1.0) * tl.exp(top - larger)
        total = total * tl.exp(largest - larger) + here
        largest = larger
        found += tl.load(at + 2, mask=mask, other=0.0)
    whole = largest + tl.log(total)
    label = tl.load(target + row, mask=mask, other=0)
    value = whole - found + z_loss * whole * whole
    value = tl.where((label >= 0) & (label < vocabulary), value, float("nan"))
    tl.store(lse + row, whole, mask=mask)
    tl.store(loss + row, tl.where(label == ignored, 0.0, value), mask=mask)


def stats_reference(
    logits: Tensor, target: Tensor, start: int, *, wide: torch.dtype = torch.float32
) -> Tensor:
    """Implements `_stats` in torch; returns (rows, 3)."""
    x = wider(logits, wide)
    top = x.amax(1)
    own = target - start
    held = (own >= 0) & (own < x.shape[1])
    found = x.gather(1, own.where(held, 0).unsqueeze(1)).squeeze(1).where(held, 0.0)
    return torch.stack([top, (x - top.unsqueeze(1)).exp().sum(1), found], 1)


def combine_reference(
    stats: Tensor,
    target: Tensor,
    vocabulary: int,
    ignored: int,
    z_loss: float,
    *,
    wide: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Implements `_combine` in torch."""
    tops, sums, targets = wider(stats, wide).unbind(-1)
    lse = (tops + sums.log()).logsumexp(0)
    loss = lse - targets.sum(0) + z_loss * lse.square()
    loss = loss.masked_fill((target < 0) | (target >= vocabulary), torch.nan)
    return loss.masked_fill(target == ignored, 0.0), lse


def reference(
    logits: Tensor,
    target: Tensor,
    ignored: int,
    z_loss: float,
    *,
    wide: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Returns loss and lse of each row, with the whole vocabulary on this device."""
    stats = stats_reference(logits, target, 0, wide=wide)
    return combine_reference(
        stats.unsqueeze(0), target, logits.shape[1], ignored, z_loss, wide=wide
    )


def _wide(x: Tensor, *shape: int) -> Tensor:
    """Returns an empty tensor for statistics, at least as precise as f32."""
    return x.new_empty(shape, dtype=sums_of(x))


def _allocate_stats(logits: Tensor, target: Tensor, start: int) -> Tensor:
    return _wide(logits, logits.shape[0], 3)


def _launch_stats(stats: Tensor, logits: Tensor, target: Tensor, start: int) -> None:
    rows, vocabulary = logits.shape
    row = launch("cross_entropy_stats", vocabulary)
    given = (logits, target, stats, row_stride(logits), vocabulary, start)
    _stats[(rows,)](*given, VECTOR=min(8, row.block), BLOCK=row.block, **row.options)


def _allocate_combine(
    stats: Tensor, target: Tensor, vocabulary: int, ignored: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    return _wide(stats, stats.shape[1]), _wide(stats, stats.shape[1])


def _launch_combine(
    results: tuple[Tensor, Tensor],
    stats: Tensor,
    target: Tensor,
    vocabulary: int,
    ignored: int,
    z_loss: float,
) -> None:
    parts, rows, _ = stats.shape
    row = launch("cross_entropy_combine", rows)
    _combine[(blocks(rows, row.block),)](
        *(stats, target, *results, rows, vocabulary, ignored, float(z_loss)),
        PARTS=parts,
        BLOCK=row.block,
        **row.options,
    )


def _allocate(logits: Tensor, target: Tensor, ignored: int, z_loss: float) -> tuple[Tensor, Tensor]:
    return _wide(logits, logits.shape[0]), _wide(logits, logits.shape[0])


def _launch(
    results: tuple[Tensor, Tensor], logits: Tensor, target: Tensor, ignored: int, z_loss: float
) -> None:
    stats = _allocate_stats(logits, target, 0)
    _launch_stats(stats, logits, target, 0)
    _launch_combine(results, stats.unsqueeze(0), target, logits.shape[1], ignored, z_loss)


def _fits(logits: Tensor, target: Tensor, *rest: Any) -> str:
    if target.dtype != torch.int64:
        return f"target of dtype {str(target.dtype).removeprefix('torch.')}"
    return evenly_spaced(logits=logits)


def _setup(ctx: Any, inputs: Args, output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignored, ctx.z_loss = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None
    given = (*ctx.saved_tensors, gradient.contiguous(), 0, ctx.ignored, ctx.z_loss)
    return BACKWARD(*given), None, None, None


def _logits(draw: Draw, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Returns logits, one row of them shifted far up, and targets, one of them ignored."""
    x = draw.normal(rows, vocabulary, scale=4.0)
    target = draw.integers(vocabulary, rows)
    if draw.device.type != "meta":
        x[0] += 100
        target[rows // 2] = IGNORED
    return x, target


def _stats_samples(draw: Draw) -> Iterable[Args]:
    for rows, vocabulary, start in ((3, 50, 0), (5, 203, 40), (2, 64, -7)):
        yield (*_logits(draw, rows, vocabulary), start)
    yield draw.normal(4, 100)[:, :70], draw.integers(70, 4), 0


def _combine_samples(draw: Draw) -> Iterable[Args]:
    for parts, rows, z_loss in ((1, 5, 0.0), (3, 70, 1e-2)):
        tops = draw.normal(parts, rows, scale=20.0, dtype=torch.float32)
        sums = draw.positive(parts, rows, dtype=torch.float32)
        found = draw.normal(parts, rows, dtype=torch.float32)
        target = draw.integers(50, rows)
        target[1] = IGNORED
        yield torch.stack([tops, sums, found], -1), target, 50, IGNORED, z_loss


def _samples(draw: Draw) -> Iterable[Args]:
    yield (*_logits(draw, 5, 203), IGNORED, 0.0)
    logits, target = _logits(draw, 3, 64)
    yield logits, target.where(target >= 0, 7), 7, 1e-2


def _typical(draw: Draw, vocabulary: int) -> tuple[Tensor, Tensor]:
    return _logits(draw, _ROWS, vocabulary or 16032)


def _typical_stats(draw: Draw, vocabulary: int) -> Args:
    return (*_typical(draw, vocabulary), 0)


def _typical_combine(draw: Draw, size: int) -> Args:
    rows = size or 16384
    stats = draw.positive(8, rows, 3, dtype=torch.float32)
    return stats, draw.integers(16032, rows), 16032, IGNORED, 0.0


STATS = Operator(
    name="cross_entropy_stats",
    allocate=_allocate_stats,
    launch=_launch_stats,
    reference=stats_reference,
    factors="t v!, t -> t s!",
    flops="4 t v",
    samples=_stats_samples,
    typical=_typical_stats,
    table="cross_entropy_stats",
    fits=_fits,
)
COMBINE = Operator(
    name="cross_entropy_combine",
    allocate=_allocate_combine,
    launch=_launch_combine,
    reference=combine_reference,
    factors="p! t s!, t -> t, t",
    flops="8 p t",
    samples=_combine_samples,
    typical=_typical_combine,
    table="cross_entropy_combine",
    dtypes=(torch.float32,),
    fits=lambda stats, *rest: "" if stats.is_contiguous() else "stats that are not contiguous",
)
FORWARD = Operator(
    name="cross_entropy",
    allocate=_allocate,
    launch=_launch,
    reference=reference,
    factors="t v~, t -> t, t",
    flops="4 t v",
    samples=_samples,
    typical=lambda draw, size: (*_typical(draw, size), IGNORED, 0.0),
    table="cross_entropy_stats",
    fits=_fits,
    gradient=Gradient(_setup, _differentiate),
    examples=("f64[4, 6], i64[4]<6, -100, 0.0", "f64[4, 6], i64[4]<6, 2, 0.01"),
)
OPERATORS = (STATS, COMBINE, FORWARD)

"""Dispatch of tokens to experts and back: rows sorted by expert, and the weighted sum of results.

Every token goes to `k` experts, so there are k slots per token. `slots` lists those of local
experts, sorted by expert; `inverse` gives the position in that list of each of all slots, -1 if
absent.

    permuted[i] = x[slots[i] // k],    out[t] = sum over j of weight[t, j] y[inverse[k t + j]]

Both directions gather, and so do their gradients: there are no atomic additions, and equal tokens
give equal bits. (The layout is that of MegaBlocks, arXiv:2211.15841, section 4.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, power_of_2, tl
from .registry.launch import launch
from .registry.operator import Args, Gradient, Operator, contiguous, wider

Pair = tuple[Tensor, Tensor]


@jit
def _permute_kernel(
    x: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    token = (tl.load(slots + row) // K).to(tl.int64)
    tl.store(out + row * n + column, tl.load(x + token * n + column, mask=mask), mask=mask)


@jit
def _unpermute_kernel(
    y: tl.tensor,
    inverse: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    WEIGHTED: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse + token * K + j).to(tl.int64)
        value = tl.load(y + row * n + column, mask=mask & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weight + token * K + j).to(tl.float32)
        total += value
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dout: tl.tensor,
    y: tl.tensor,
    inverse: tl.tensor,
    weight: tl.tensor,
    dy: tl.tensor,
    dweight: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Handles one slot: the gradients of its row of y, if local, and of its weight."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(inverse + slot).to(tl.int64)
    w = tl.load(weight + slot).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(0, tl.cdiv(n, BLOCK)):
        column = block * BLOCK + tl.arange(0, BLOCK)
        mask = (column < n) & (row >= 0)
        d = tl.load(dout + slot // K * n + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(y + row * n + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(dy + row * n + column, (d * w).to(dy.dtype.element_ty), mask=mask)
        total += d * value
    tl.store(dweight + slot, tl.sum(total, axis=0).to(dweight.dtype.element_ty))


def permute_reference(
    x: Tensor, slots: Tensor, inverse: Tensor, *, wide: torch.dtype = torch.float32
) -> Tensor:
    """Returns (slots, features): the rows of x in the order of their slots."""
    return x[slots // (inverse.numel() // x.shape[0])]


def _rows(y: Tensor, inverse: Tensor) -> Tensor:
    """Returns (all slots, features): each slot's row of y, zeros if absent."""
    here = (inverse >= 0).unsqueeze(1)
    if not y.shape[0]:
        return y.new_zeros(inverse.numel(), y.shape[1])
    return torch.where(here, y[inverse.clamp(min=0)], y.new_zeros(()))


def unpermute_reference(
    y: Tensor, inverse: Tensor, weight: Tensor, *, wide: torch.dtype = torch.float32
) -> Tensor:
    """Returns (tokens, features): the weighted sum of each token's rows of y."""
    rows = _rows(wider(y, wide), inverse).view(*weight.shape, y.shape[1])
    return (rows * wider(weight, wide).unsqueeze(-1)).sum(1).to(y.dtype)


def gather_reference(
    d: Tensor, inverse: Tensor, k: int, *, wide: torch.dtype = torch.float32
) -> Tensor:
    """Returns (tokens, features): each token's sum of rows of d; `experts_permute`'s gradient."""
    rows = _rows(wider(d, wide), inverse)
    return rows.view(inverse.numel() // k, k, d.shape[1]).sum(1).to(d.dtype)


def backward_reference(
    dout: Tensor, y: Tensor, inverse: Tensor, weight: Tensor, *, wide: torch.dtype = torch.float32
) -> Pair:
    """Returns (dy, dweight)."""
    d = wider(dout, wide).repeat_interleave(weight.shape[1], 0)
    dweight = (d * _rows(wider(y, wide), inverse)).sum(1)
    order = inverse.argsort(stable=True)[inverse.numel() - y.shape[0] :]  # slots in order of rows
    dy = (d * wider(weight, wide).reshape(-1, 1))[order]
    return dy.to(y.dtype), dweight.view(weight.shape).to(weight.dtype)


def _allocate_permute(x: Tensor, slots: Tensor, inverse: Tensor) -> Tensor:
    return x.new_empty((slots.numel(), x.shape[1]))


def _launch_permute(out: Tensor, x: Tensor, slots: Tensor, inverse: Tensor) -> None:
    n = x.shape[1]
    row = launch("experts_permute", n)
    _permute_kernel[(slots.numel(), blocks(n, row.block))](
        *(x, slots, out, n), K=inverse.numel() // x.shape[0], BLOCK=row.block, **row.options
    )


def _allocate_unpermute(y: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    return y.new_empty((weight.shape[0], y.shape[1]))


def _launch_unpermute(out: Tensor, y: Tensor, inverse: Tensor, weight: Tensor) -> None:
    _gather(out, y, inverse, weight, weight.shape[1])


def _allocate_gather(d: Tensor, inverse: Tensor, k: int) -> Tensor:
    return d.new_empty((inverse.numel() // k, d.shape[1]))


def _launch_gather(out: Tensor, d: Tensor, inverse: Tensor, k: int) -> None:
    _gather(out, d, inverse, None, k)


def _gather(out: Tensor, y: Tensor, inverse: Tensor, weight: Tensor | None, k: int) -> None:
    n = y.shape[1]
    row = launch("experts_unpermute", n)
    _unpermute_kernel[(out.shape[0], blocks(n, row.block))](
        *(y, inverse, y if weight is None else weight, out, n),
        WEIGHTED=weight is not None,
        K=k,
        BLOCK=row.block,
        **row.options,
    )


def _allocate_backward(dout: Tensor, y: Tensor, inverse: Tensor, weight: Tensor) -> Pair:
    return torch.empty_like(y, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _launch_backward(
    results: Pair, dout: Tensor, y: Tensor, inverse: Tensor, weight: Tensor
) -> None:
    n = y.shape[1]
    row = launch("experts_backward", n)
    _backward_kernel[(inverse.numel(),)](
        *(dout, y, inverse, weight, *results, n),
        K=weight.shape[1],
        BLOCK=min(row.block, power_of_2(n)),
        **row.options,
    )


def _wrong_permute(x: Tensor, slots: Tensor, inverse: Tensor) -> str:
    if x.shape[0] and inverse.numel() % x.shape[0]:
        return f"{inverse.numel()} slots are not a multiple of {x.shape[0]} tokens"
    return ""


def _wrong_unpermute(y: Tensor, inverse: Tensor, weight: Tensor) -> str:
    if inverse.numel() != weight.numel():
        return f"{inverse.numel()} slots have {weight.numel()} weights"
    return ""


def _fits(*args: Any) -> str:
    tensors = {f"operand {i}": a for i, a in enumerate(args) if isinstance(a, Tensor)}
    return contiguous(**tensors)


def _setup_permute(ctx: Any, inputs: Args, output: Tensor) -> None:
    x, _, inverse = inputs
    ctx.k = inverse.numel() // max(x.shape[0], 1)
    ctx.save_for_backward(inverse)


def _differentiate_permute(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    return GATHER(d.contiguous(), *ctx.saved_tensors, ctx.k), None, None


def _setup_unpermute(ctx: Any, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_unpermute(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dy, dweight = BACKWARD(dout.contiguous(), *ctx.saved_tensors)
    return dy, None, dweight


def _slots(draw: Draw, tokens: int, k: int, experts: int = 8) -> Pair:
    """Returns slots sorted by a random expert, of the first `experts` of 8, and the inverse."""
    expert = draw.integers(8, tokens * k)
    if draw.device.type == "meta":
        return expert, expert
    slots = expert.argsort(stable=True)[: int((expert < experts).sum())]
    inverse = expert.new_full((tokens * k,), -1)
    inverse[slots] = torch.arange(slots.numel(), device=slots.device)
    return slots, inverse


def _permute_samples(draw: Draw) -> Iterable[Args]:
    for tokens, k, n, experts in ((6, 2, 100, 8), (4, 1, 48, 8), (6, 2, 48, 5)):
        yield draw.normal(tokens, n), *_slots(draw, tokens, k, experts)


def _unpermute_samples(draw: Draw) -> Iterable[Args]:
    for tokens, k, n, experts in ((6, 2, 100, 8), (4, 3, 48, 5)):
        slots, inverse = _slots(draw, tokens, k, experts)
        yield draw.normal(slots.numel(), n), inverse, draw.positive(tokens, k)


def _gather_samples(draw: Draw) -> Iterable[Args]:
    for experts in (8, 5):
        slots, inverse = _slots(draw, 6, 2, experts)
        yield draw.normal(slots.numel(), 100), inverse, 2


def _backward_samples(draw: Draw) -> Iterable[Args]:
    for y, inverse, weight in _unpermute_samples(draw):
        yield draw.normal(weight.shape[0], y.shape[1]), y, inverse, weight


def _typical(draw: Draw, n: int) -> Args:
    return draw.normal(4096, n or 4096), *_slots(draw, 4096, 8)


def _typical_unpermute(draw: Draw, n: int) -> Args:
    return draw.normal(4096 * 8, n or 4096), _slots(draw, 4096, 8)[1], draw.positive(4096, 8)


def _typical_backward(draw: Draw, n: int) -> Args:
    y, inverse, weight = _typical_unpermute(draw, n)
    return draw.normal(4096, n or 4096), y, inverse, weight


GATHER = Operator(
    name="experts_gather",
    allocate=_allocate_gather,
    launch=_launch_gather,
    reference=gather_reference,
    factors="s! n, f! -> t! n",
    flops="s n",
    samples=_gather_samples,
    typical=lambda draw, n: (draw.normal(4096 * 8, n or 4096), _slots(draw, 4096, 8)[1], 8),
    table="experts_unpermute",
    fits=_fits,
)
BACKWARD = Operator(
    name="experts_unpermute_backward",
    allocate=_allocate_backward,
    launch=_launch_backward,
    reference=backward_reference,
    factors="t! n!, s! n!, f!, t! k! -> s! n!, t! k!",
    flops="3 s n",
    samples=_backward_samples,
    typical=_typical_backward,
    table="experts_backward",
    fits=_fits,
)
PERMUTE = Operator(
    name="experts_permute",
    allocate=_allocate_permute,
    launch=_launch_permute,
    reference=permute_reference,
    factors="t! n, s!, f! -> s! n",
    flops="out",
    passes={"inverse": 0},
    samples=_permute_samples,
    typical=_typical,
    table="experts_permute",
    wrong=_wrong_permute,
    fits=_fits,
    gradient=Gradient(_setup_permute, _differentiate_permute),
)
UNPERMUTE = Operator(
    name="experts_unpermute",
    allocate=_allocate_unpermute,
    launch=_launch_unpermute,
    reference=unpermute_reference,
    factors="s! n, f!, t! k! -> t! n",
    flops="2 s n",
    samples=_unpermute_samples,
    typical=_typical_unpermute,
    table="experts_unpermute",
    wrong=_wrong_unpermute,
    fits=_fits,
    gradient=Gradient(_setup_unpermute, _differentiate_unpermute),
)
OPERATORS = (PERMUTE, UNPERMUTE, GATHER, BACKWARD)

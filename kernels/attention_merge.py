"""Merges two attentions of the same queries over different keys into one.

    lse = log(exp lse1 + exp lse2),    out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

In ring attention (arXiv:2310.01889, section 3) keys and values travel around a ring, and each
device merges its result for every block that passes. A block without a key for a query has lse -inf
there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, power_of_2, tl
from .registry.launch import launch
from .registry.operator import Args, Operator, contiguous, wider


@jit
def _kernel(
    out: tl.tensor,
    lse: tl.tensor,
    other: tl.tensor,
    other_lse: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Handles some rows of one head: out is (batch, row, head, width), lse (batch, head, row)."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    held = row < rows
    at = (batch * heads + head) * rows + row
    first = tl.load(lse + at, mask=held, other=0.0)
    second = tl.load(other_lse + at, mask=held, other=0.0)
    top = tl.maximum(first, second)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither has a key
    one = tl.exp(first - top)
    two = tl.exp(second - top)
    total = one + two
    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(lse + at, top + tl.log(total), mask=held)
    mask = held[:, None] & (column < width)[None, :]
    place = ((batch * rows + row) * heads + head)[:, None] * width + column[None, :]
    a = tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(other + place, mask=mask, other=0.0).to(tl.float32)
    merged = a * (one * share)[:, None] + b * (two * share)[:, None]
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=mask)


def reference(
    out: Tensor,
    lse: Tensor,
    other: Tensor,
    other_lse: Tensor,
    *,
    wide: torch.dtype = torch.float32,
) -> None:
    """Implements the kernel in torch."""
    both = torch.stack([wider(lse, wide), wider(other_lse, wide)])
    total = both.logsumexp(0)
    share = (both - total).exp().nan_to_num().movedim(2, 3).unsqueeze(-1)
    out.copy_(share[0] * wider(out, wide) + share[1] * wider(other, wide))
    lse.copy_(total)


def _allocate(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    return None


def _launch(results: None, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    batch, rows, heads, width = out.shape
    row = launch("attention_merge", width)
    _kernel[(blocks(rows, row.block), batch * heads)](
        *(out, lse, other, other_lse, rows, heads, width),
        ROWS=row.block,
        WIDTH=power_of_2(width),
        **row.options,
    )


def _fits(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> str:
    for name, tensor in (("lse", lse), ("other_lse", other_lse)):
        if tensor.dtype != torch.float32:
            return f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}"
    return contiguous(out=out, lse=lse, other=other, other_lse=other_lse)


def _samples(draw: Draw) -> Iterable[Args]:
    for width in (16, 24):
        first, second = (draw.normal(2, 3, 5, scale=3.0, dtype=torch.float32) for _ in range(2))
        first[0, 0, :2] = second[0, 0, 1:3] = -torch.inf  # no key for one, for the other, for both
        out = draw.normal(2, 5, 3, width, dtype=torch.float32)
        yield out, first, draw.normal(2, 5, 3, width), second


def _typical(draw: Draw, width: int) -> Args:
    shape = (2, 4096, 32, width or 128)
    lse = draw.normal(2, 32, 4096, dtype=torch.float32)
    return draw.normal(*shape, dtype=torch.float32), lse, draw.normal(*shape), lse


OPERATORS = (
    Operator(
        name="attention_merge_",
        allocate=_allocate,
        launch=_launch,
        reference=reference,
        factors="b s h d, b h s, b s h d, b h s ->",
        flops="3 b s h d",
        writes=("out", "lse"),
        samples=_samples,
        typical=_typical,
        table="attention_merge",
        fits=_fits,
    ),
)

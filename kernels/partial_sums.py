"""The sum of several adjacent tensors, in float32 and always in the same order.

For the blocks that an all_to_all delivers in place of a reduce_scatter, or the gradients of several
microbatches: adding them here rounds once, while a ring in bf16 rounds at every device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, tl
from .registry.launch import launch
from .registry.operator import Args, Operator, contiguous, wider


@jit
def _kernel(
    parts: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(parts + at, mask=mask, other=0.0).to(tl.float32)
        parts += n
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=mask)


def reference(
    parts: Tensor, scale: float, dtype: torch.dtype, *, wide: torch.dtype = torch.float32
) -> Tensor:
    """Returns scale times the sum over the first dimension, rounded to `dtype` once."""
    total = wider(parts[0], wide)
    for part in parts[1:]:
        total = total + part
    return (total * scale).to(dtype)


def _allocate(parts: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return parts.new_empty(parts.shape[1:], dtype=dtype)


def _launch(out: Tensor, parts: Tensor, scale: float, dtype: torch.dtype) -> None:
    n = out.numel()
    row = launch("sum_partials", n)
    _kernel[(blocks(n, row.block),)](
        *(parts, out, n, float(scale)), PARTS=parts.shape[0], BLOCK=row.block, **row.options
    )


def _samples(draw: Draw) -> Iterable[Args]:
    yield draw.normal(3, 5, 41), 0.5, torch.float32
    yield draw.normal(1, 70), 1.0, torch.bfloat16


OPERATORS = (
    Operator(
        name="sum_partials",
        allocate=_allocate,
        launch=_launch,
        reference=reference,
        factors="p! ... -> ...",
        flops="p ...",
        samples=_samples,
        typical=lambda draw, n: (draw.normal(8, n or 1 << 24), 1.0, torch.float32),
        table="sum_partials",
        fits=lambda parts, scale, dtype: contiguous(parts=parts),
    ),
)

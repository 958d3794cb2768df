"""The gradient of the cross entropy, written over the logits or to a new tensor.

    d loss / d x = (1 + 2 z lse) softmax(x) - onehot(target)

times the gradient of each row's loss. It only needs the row's lse, so that devices with parts of
the vocabulary need not communicate. `cross_entropy_backward_` overwrites the logits, which have no
more readers, in their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, tl
from .registry.launch import launch
from .registry.operator import Args, Operator, evenly_spaced, row_stride, wider

IGNORED = -100


@jit
def _kernel(
    logits: tl.tensor,
    target: tl.tensor,
    lse: tl.tensor,
    gradient: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    vocabulary: tl.tensor,
    start: tl.tensor,
    ignored: tl.tensor,
    z_loss: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    LOG2_E: tl.constexpr = 1.4426950408889634
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocabulary
    label = tl.load(target + row)
    whole = tl.load(lse + row)
    scale = tl.where(label == ignored, 0.0, tl.load(gradient + row))
    x = tl.load(logits + row * stride + column, mask=mask, other=float("-inf")).to(tl.float32)
    share = tl.exp2((x - whole) * LOG2_E) * (1.0 + 2.0 * z_loss * whole)
    d = scale * (share - tl.where(column == label - start, 1.0, 0.0))
    # An ignored row has no gradient, whatever its logits are.
    d = tl.where(label == ignored, 0.0, d)
    tl.store(out + row * out_stride + column, d.to(out.dtype.element_ty), mask=mask)


def reference(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    gradient: Tensor,
    start: int,
    ignored: int,
    z_loss: float,
    *,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    """Implements the kernel in torch."""
    whole = wider(lse, wide).unsqueeze(1)
    share = (wider(logits, wide) - whole).exp() * (1 + 2 * z_loss * whole)
    columns = torch.arange(logits.shape[1], device=logits.device)
    share = share - (columns == (target - start).unsqueeze(1)).to(share.dtype)
    d = gradient.unsqueeze(1) * share
    return d.masked_fill((target == ignored).unsqueeze(1), 0.0).to(logits.dtype)


def reference_into(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    gradient: Tensor,
    start: int,
    ignored: int,
    z_loss: float,
    *,
    wide: torch.dtype = torch.float32,
) -> None:
    """Does the same, over the logits."""
    rest = (target, lse, gradient, start, ignored, z_loss)
    logits.copy_(reference(logits, *rest, wide=wide))


def _allocate(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    gradient: Tensor,
    start: int,
    ignored: int,
    z_loss: float,
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _allocate_nothing(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    gradient: Tensor,
    start: int,
    ignored: int,
    z_loss: float,
) -> None:
    return None


def _launch(
    out: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    gradient: Tensor,
    start: int,
    ignored: int,
    z_loss: float,
) -> None:
    rows, vocabulary = logits.shape
    row = launch("cross_entropy_backward", vocabulary)
    out = logits if out is None else out
    _kernel[(rows, blocks(vocabulary, row.block))](
        *(logits, target, lse, gradient, out, row_stride(logits), row_stride(out)),
        *(vocabulary, start, ignored, float(z_loss)),
        BLOCK=row.block,
        **row.options,
    )


def _samples(draw: Draw) -> Iterable[Args]:
    for rows, vocabulary, start, z_loss in ((3, 50, 0, 0.0), (4, 203, 20, 1e-2)):
        logits, target = draw.normal(rows, vocabulary, scale=4.0), draw.integers(vocabulary, rows)
        target[rows // 2] = IGNORED
        lse = wider(logits, torch.float32).logsumexp(1)
        yield logits, target, lse, draw.positive(rows, dtype=lse.dtype), start, IGNORED, z_loss


def _typical(draw: Draw, vocabulary: int) -> Args:
    rows, vocabulary = 1024, vocabulary or 16032
    lse = draw.positive(rows, dtype=torch.float32)
    logits, target = draw.normal(rows, vocabulary), draw.integers(vocabulary, rows)
    return logits, target, lse, lse, 0, IGNORED, 0.0


BACKWARD = Operator(
    name="cross_entropy_backward",
    allocate=_allocate,
    launch=_launch,
    reference=reference,
    factors="t v, t, t, t -> t v",
    flops="6 t v",
    samples=_samples,
    typical=_typical,
    table="cross_entropy_backward",
    fits=lambda logits, *rest: evenly_spaced(logits=logits),
)
BACKWARD_INTO = Operator(
    name="cross_entropy_backward_",
    allocate=_allocate_nothing,
    launch=_launch,
    reference=reference_into,
    factors="t v, t, t, t ->",
    flops="6 t v",
    writes=("logits",),
    samples=_samples,
    typical=_typical,
    table="cross_entropy_backward",
    fits=lambda logits, *rest: evenly_spaced(logits=logits),
)
OPERATORS = (BACKWARD, BACKWARD_INTO)

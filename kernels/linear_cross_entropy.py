"""Linear and cross entropy fused, by chunks of rows: logits exist for one chunk at a time.

    sum of losses of x weightᵀ, and in the same pass the gradients of x and weight

The logits of a chunk are overwritten by their gradient, which is multiplied at once: three matrix
products per chunk, as without chunks, and rows x words elements of memory saved (the idea of
Liger's fused linear cross entropy, arXiv:2410.10989, section 3.2). With a vocabulary split between
devices, each has its words' rows of `weight`; its gradient of x is then a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .cross_entropy import COMBINE, STATS
from .cross_entropy_backward import BACKWARD, BACKWARD_INTO, IGNORED
from .registry.draw import Draw
from .registry.operator import Args, Gradient, KernelError, Operator, sums_of

CHUNK = 2048  # rows, enough to keep a GPU's matrix units busy
Gather = Callable[[Tensor], Tensor]
Losses = tuple[Tensor, Tensor, Tensor]


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        start: int,
        vocabulary: int,
        gather: Gather,
        ignored: int,
        z_loss: float,
    ) -> Tensor:
        stats = gather(STATS.run(logits, target, start))
        loss: Tensor
        loss, lse = COMBINE.run(stats, target, vocabulary, ignored, z_loss)
        ctx.save_for_backward(logits, target, lse)
        ctx.rest = (start, ignored, z_loss)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d = BACKWARD.run(*ctx.saved_tensors, gradients[0].contiguous(), *ctx.rest)
        return d, None, None, None, None, None, None


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        loss, dx, dweight = chunked(x, weight, *rest, gradients=True)
        ctx.save_for_backward(dx, dweight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return dx * gradients[0].to(dx.dtype), dweight * gradients[0].to(dweight.dtype), *[None] * 7


def parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    start: int,
    vocabulary: int,
    gather: Gather,
    ignored: int = IGNORED,
    z_loss: float = 0.0,
) -> Tensor:
    """Returns the losses of rows whose vocabulary is split between devices, alike on each of them.

    Args:
        logits: (rows, this device's part of the vocabulary).
        target: (rows,), indices in the whole vocabulary.
        start: index of this device's first word.
        vocabulary: size of the whole vocabulary.
        gather: stacks the tensors of all devices, (rows, 3) -> (devices, rows, 3).
        ignored: the target of rows that do not count.
        z_loss: weight of the squared lse.

    Raises:
        KernelError: shapes do not fit together.
    """
    found: Tensor = _Parallel.apply(  # type: ignore[no-untyped-call]
        logits, target, start, vocabulary, gather, ignored, z_loss
    )
    return found


def parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    start: int,
    vocabulary: int,
    gather: Gather,
    ignored: int = IGNORED,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Returns the sum of all rows' losses, for logits x weightᵀ; alike on every device.

    x is (rows, features), `weight` this device's (words, features); the other arguments are as in
    `parallel_cross_entropy`. The gradient of x is this device's part of a sum.

    Raises:
        KernelError: shapes do not fit together.
    """
    rest = (target, start, vocabulary, gather, ignored, z_loss, chunk)
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return chunked(x, weight, *rest, gradients=False)[0]
    found: Tensor = _ParallelLinear.apply(x, weight, *rest)  # type: ignore[no-untyped-call]
    return found


def chunked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    start: int,
    vocabulary: int,
    gather: Gather,
    ignored: int,
    z_loss: float,
    chunk: int,
    *,
    gradients: bool,
) -> Losses:
    """Returns (sum of losses, dx, dweight), the last two empty unless `gradients` are wanted.

    Products of chunks accumulate in float32.
    """
    wide = sums_of(x)
    loss = x.new_zeros((), dtype=wide)
    dx = torch.empty_like(x) if gradients else x.new_empty(0)
    total = weight.new_zeros(weight.shape if gradients else (0,), dtype=wide)
    for rows in range(0, x.shape[0], chunk):
        own, labels = x[rows : rows + chunk], target[rows : rows + chunk]
        logits = own @ weight.T
        stats = gather(STATS.run(logits, labels, start))
        losses, lse = COMBINE.run(stats, labels, vocabulary, ignored, z_loss)
        loss += losses.sum()
        if gradients:
            BACKWARD_INTO.run(logits, labels, lse, torch.ones_like(lse), start, ignored, z_loss)
            torch.mm(logits, weight, out=dx[rows : rows + chunk])
            total += _product(logits.T, own)
    return loss, dx, total.to(weight.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b in float32, if possible without rounding to the operands' dtype."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignored: int,
    z_loss: float,
    chunk: int,
    gradients: bool,
    *,
    wide: torch.dtype = torch.float32,
) -> Losses:
    """Does the same on one device with all words; chunks call the kernels if available."""
    words = weight.shape[0]
    rest = (target, 0, words, _alone, ignored, z_loss, chunk)
    return chunked(x, weight, *rest, gradients=gradients)


def _alone(stats: Tensor) -> Tensor:
    return stats.unsqueeze(0)


def _allocate(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignored: int,
    z_loss: float,
    chunk: int,
    gradients: bool,
) -> Losses:
    loss = x.new_empty((), dtype=sums_of(x))
    if not gradients:
        return loss, x.new_empty(0), weight.new_empty(0)
    return loss, torch.empty_like(x), torch.empty_like(weight)


def _setup(ctx: Any, inputs: Args, output: Losses) -> None:
    ctx.gradients = inputs[-1]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, *rest: None) -> tuple[Tensor | None, ...]:
    if not ctx.gradients:
        raise KernelError(
            "autopar_kernels.linear_cross_entropy was called with gradients=False, but is "
            "differentiated; call it with gradients=True"
        )
    if gradient is None:
        return (None,) * 7
    found = [d * gradient.to(d.dtype) for d in ctx.saved_tensors]
    return *found, *[None] * 5


def _samples(draw: Draw) -> Iterable[Args]:
    target = draw.integers(50, 7)
    target[3] = IGNORED
    x, weight = draw.normal(7, 12), draw.normal(50, 12)
    yield x, weight, target, IGNORED, 1e-2, 3, True
    yield x, weight, target, IGNORED, 0.0, CHUNK, False


def _typical(draw: Draw, size: int) -> Args:
    words, rows, features = size or 16032, 4096, 4096
    x, weight = draw.normal(rows, features), draw.normal(words, features, scale=0.02)
    return x, weight, draw.integers(words, rows), IGNORED, 0.0, CHUNK, True


OPERATORS = (
    Operator(
        name="linear_cross_entropy",
        allocate=_allocate,
        launch=lambda *args: None,
        reference=reference,
        factors="t k!, v~ k!, t ->, t k!, v k!",
        flops="6 t v k",
        samples=_samples,
        typical=_typical,
        table="",
        gradient=Gradient(_setup, _differentiate),
        examples=("f64[4, 3], f64[6, 3], i64[4]<6, -100, 0.0, 3, True",),
    ),
)

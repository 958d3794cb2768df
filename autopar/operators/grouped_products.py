"""Products of each expert's rows with its own matrix, as operators of torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16  # bytes, required by torch's own grouped product


# These are operators of autopar, because torch's grouped product supports neither float64 nor, on
# tensors without values, float32; and because the number of an expert's rows cannot be traced.
@torch.library.custom_op("autopar::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each expert's rows: x [rows, k], weight [experts, n, k], ends int32 [experts]."""
    if _fits(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends)):
        out[start:end] = x[start:end] @ weight[expert].T
    return out


@torch.library.custom_op("autopar::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Returns x.T @ y over each expert's rows: [experts, columns of x, columns of y]."""
    if _fits(x, y):
        return F.grouped_mm(x.T, y, offs=ends)
    out = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends)):
        out[expert] = x[start:end].T @ y[start:end]
    return out


def _fits(*operands: Tensor) -> bool:
    """Returns whether torch's grouped product accepts the operands."""
    return all(
        x.dtype == torch.bfloat16
        and x.numel()
        and all(size * x.element_size() % _ALIGNMENT == 0 for size in x.shape[1:])
        for x in operands
    )


def _ranges(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    given = given.contiguous()
    into, own, _ = ctx.needs_input_grad
    return (
        grouped_linear(given, weight.transpose(1, 2), ends) if into else None,
        grouped_outer(given, x, ends) if own else None,
        None,
    )


grouped_linear.register_autograd(_gradients, setup_context=_keep)

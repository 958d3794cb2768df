"""The kernels as graphs and generated programs call them.

A kernel is found here by its name. Those that are called otherwise than their file says have a
function. What a kernel keeps for its own backward is no result here. Importing this module makes
torch operators of them; on a GPU Triton's kernels run, elsewhere their references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.operators.across import CHUNK
from autopar_kernels.registry import operators, register

_LIBRARY = register()  # holds the operators
_OPS = torch.ops.autopar_kernels


def __getattr__(name: str) -> Callable[..., Tensor]:
    """A kernel that is called as its file says, of which the first result is wanted."""
    if name not in operators():
        raise AttributeError(f"there is no kernel {name}")
    return partial(_first, getattr(_OPS, name))


def _first(operator: Callable[..., Tensor | tuple[Tensor, ...]], *operands: object) -> Tensor:
    results = operator(*operands)
    return results if isinstance(results, Tensor) else results[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, times the weight."""
    y: Tensor = _OPS.rms_norm(x, weight, eps)[0]
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum."""
    y, h, _ = _OPS.add_rms_norm(x, residual, weight, eps)
    return y, h


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The layer norm of x + residual, and that sum."""
    y, h, *_ = _OPS.add_layer_norm(x, residual, weight, bias, eps)
    return y, h


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form, which torch has in one kernel."""
    return F.gelu(x, approximate="tanh")


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x, (batch, row, head, width), rotated by angles (row, width) whose halves are alike."""
    y: Tensor = _OPS.rotary(x, cos, sin)
    return y


def rotary_pack(x: Tensor, cos: Tensor, sin: Tensor, parts: int) -> Tensor:
    """`rotary` as an all_to_all of rows for heads sends it: (part, row, batch, head, width)."""
    packed: Tensor = _OPS.rotary_pack(x, None, None, cos, sin, parts)
    return packed


def rotary_unpack(packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotary_pack`, which is also its gradient."""
    x: Tensor = _OPS.rotary_unpack(packed, cos, sin, packed.shape[0] * packed.shape[3], 0)[0]
    return x


def experts_permute(x: Tensor, slots: Tensor, inverse: Tensor) -> Tensor:
    """The rows of x in the order of `slots`, of which each row has some; see `mixture.py`."""
    rows: Tensor = _OPS.experts_permute(x.contiguous(), slots, inverse)
    return rows


def experts_unpermute(y: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum of each token's rows of y, those left out that are not there."""
    total: Tensor = _OPS.experts_unpermute(y.contiguous(), inverse, weight.contiguous())
    return total


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The sum of the losses of logits x weightᵀ, a chunk of rows at a time.

    x is (..., features), labels are (...); those that are `ignored` do not count.
    """
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    rows, flat = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    arguments = (ignored, 0.0, CHUNK, gradients)
    loss: Tensor = _OPS.linear_cross_entropy(rows, weight, flat, *arguments)[0]
    return loss

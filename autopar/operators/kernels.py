"""The kernels as graphs and generated programs call them.

Every kernel is an attribute of this module. A kernel with another signature here than in its file
has a function below. Tensors that a kernel saves for its own backward are not results here.
Importing this module registers the kernels as torch operators. On a GPU the Triton kernels run,
elsewhere their references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.operators.device_work import CHUNK
from autopar_kernels.registry import operators, register

_LIBRARY = register()  # keeps the operators registered
_OPS = torch.ops.autopar_kernels


def __getattr__(name: str) -> Callable[..., Tensor]:
    """Returns a function that calls a kernel with the signature of its file: its first result."""
    if name not in operators():
        raise AttributeError(f"there is no kernel {name}")
    return partial(_first, getattr(_OPS, name))


def _first(operator: Callable[..., Tensor | tuple[Tensor, ...]], *operands: object) -> Tensor:
    results = operator(*operands)
    return results if isinstance(results, Tensor) else results[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x divided by the root of its mean square, times the weight."""
    y: Tensor = _OPS.rms_norm(x, weight, eps)[0]
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of x + residual, and that sum."""
    y, h, _ = _OPS.add_rms_norm(x, residual, weight, eps)
    return y, h


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the layer norm of x + residual, and that sum."""
    y, h, *_ = _OPS.add_layer_norm(x, residual, weight, bias, eps)
    return y, h


def gelu(x: Tensor) -> Tensor:
    """Returns GELU in the tanh approximation, for which torch has one kernel."""
    return F.gelu(x, approximate="tanh")


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x, (batch, row, head, width), by angles (row, width) with equal halves."""
    y: Tensor = _OPS.rotary(x, cos, sin)
    return y


def rotary_pack(x: Tensor, cos: Tensor, sin: Tensor, parts: int) -> Tensor:
    """Rotates x to the order of an all_to_all's send buffer: (part, row, batch, head, width)."""
    packed: Tensor = _OPS.rotary_pack(x, None, None, cos, sin, parts)
    return packed


def rotary_unpack(packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inverts `rotary_pack`; also its gradient."""
    x: Tensor = _OPS.rotary_unpack(packed, cos, sin, packed.shape[0] * packed.shape[3], 0)[0]
    return x


def experts_permute(x: Tensor, slots: Tensor, inverse: Tensor) -> Tensor:
    """Returns the rows of x in the order of `slots`, several per row; see `mixture.py`."""
    rows: Tensor = _OPS.experts_permute(x.contiguous(), slots, inverse)
    return rows


def experts_unpermute(y: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Returns the weighted sum of each token's rows of y, without absent ones."""
    total: Tensor = _OPS.experts_unpermute(y.contiguous(), inverse, weight.contiguous())
    return total


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Returns the summed losses of logits x weightᵀ, computed a chunk of rows at a time.

    x is (..., features), labels are (...); labels equal to `ignored` do not count.
    """
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    rows, flat = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    arguments = (ignored, 0.0, CHUNK, gradients)
    loss: Tensor = _OPS.linear_cross_entropy(rows, weight, flat, *arguments)[0]
    return loss

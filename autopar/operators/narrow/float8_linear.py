"""Linears whose products are in 8 bits, each operand scaled to the range of its format.

    y = mesh.float8_linear(x, weight, rows="data", contracted="gpu")

Each of the three products, of the result, of the gradient of x and of that of the weight, is
torch's `_scaled_mm` of two matrices that are contracted along their rows. The recipes are those of
torchao (torchao/float8/config.py):

    "float8"       a scale for each tensor; gradients of results are e5m2, all else e4m3
    "float8-rows"  a scale for each row of each product's operands, rounded down to a power of two;
                   all operands are e4m3

A scale follows from the largest absolute element of a tensor or row. Where devices hold parts of
it, they exchange their largest elements, so that a program rounds as one device would, whatever its
mesh. Operands are saved as they are and rounded again in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import ProgramError

if TYPE_CHECKING:
    from autopar.operators.peer_devices import Devices

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-12  # of the largest elements: zeros have a finite scale, as in torchao
_ALIGNMENT = 16  # of contracted elements and columns, for cuBLAS
_OUT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that `_scaled_mm` returns


@dataclass(frozen=True)
class Scaling:
    """Scales of the operands of one linear, whose dimensions devices split.

    Attributes:
        devices: of the mesh.
        by_row: whether each row of an operand has a scale, rather than each tensor.
        rows, columns, contracted: the axes that split the rows of x, the columns of the result, and
            the elements that are summed.
    """

    devices: Devices
    by_row: bool
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    contracted: tuple[str, ...]

    def cast(
        self,
        matrix: Tensor,
        outer: tuple[str, ...],
        inner: tuple[str, ...],
        dtype: torch.dtype = E4M3,
        scale: Tensor | None = None,
    ) -> _Narrow:
        """Returns a matrix, which `outer` and `inner` axes split, in 8 bits, row by row in memory.

        Args:
            matrix: a product contracts its rows.
            outer, inner: the axes that split its first and its last dimension.
            dtype: the format, if scales belong to tensors.
            scale: of the tensor, if it is known.
        """
        dtype = E4M3 if self.by_row else dtype
        if scale is None:
            scale = self._scale(matrix, inner if self.by_row else (*outer, *inner), dtype)
        # A kernel with a narrow result writes no intermediate in 32 bits.
        narrow = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
        torch.mul(matrix, scale, out=narrow)
        return _Narrow(narrow, scale)

    def _scale(self, matrix: Tensor, axes: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        """Returns the factor to the range of a format, [rows, 1] or [1, 1]."""
        if matrix.numel():
            dim = -1 if self.by_row else (0, 1)
            largest = torch.linalg.vector_norm(
                matrix, torch.inf, dim, keepdim=True, dtype=_wide(matrix)
            ).float()
        else:  # of a device without elements
            shape = (matrix.shape[0] if self.by_row else 1, 1)
            largest = torch.zeros(shape, dtype=torch.float32, device=matrix.device)
        if axes:
            largest = self.devices.group(axes).maximum(largest)
        scale = (torch.finfo(dtype).max / largest.double().clamp(min=_SMALLEST)).float()
        rounded: Tensor = scale.log2().floor().exp2() if self.by_row else scale
        return rounded


@dataclass(frozen=True)
class _Narrow:
    """A matrix in 8 bits, and the factor by which it was multiplied."""

    values: Tensor
    scale: Tensor


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _product(a: _Narrow, b: _Narrow, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Returns a bᵀ.

    Raises:
        ProgramError: the device cannot multiply these.
    """
    (rows, inner), columns = a.values.shape, b.values.shape[0]
    if not rows or not columns or not inner:
        return torch.zeros((rows, columns), dtype=dtype, device=a.values.device)
    given = dtype if dtype in _OUT else torch.float32
    if a.scale.numel() > 1 and a.values.is_cuda:
        given = torch.bfloat16  # the only one that its kernels write
    more, beside = -inner % _ALIGNMENT, -columns % _ALIGNMENT
    left, right = _padded(a.values, 0, more), _padded(b.values, beside, more)
    into = b.scale.reciprocal()
    into = F.pad(into, (0, 0, 0, beside), value=1.0) if beside and into.numel() > 1 else into
    try:
        result: Tensor = torch.ops.aten._scaled_mm(
            left,
            right.t(),
            a.scale.reciprocal(),
            into.t().contiguous(),
            out_dtype=given,
            use_fast_accum=fast and a.values.is_cuda,
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ProgramError(
            f"{a.values.device} cannot multiply in 8 bits",
            why=str(error).partition("\n")[0],
            todo="omit `linears` from `execution`, or use devices whose torch has such products",
        ) from error
    return result[:, :columns].to(dtype)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    if not rows and not columns:
        return x
    # Bytes, since torch pads no 8-bit floats; a byte of zeros is a zero.
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        a = scaling.cast(x.reshape(-1, x.shape[-1]), scaling.rows, scaling.contracted)
        b = scaling.cast(weight, scaling.columns, scaling.contracted)
        ctx.scaling = scaling
        ctx.scales = (None, None) if scaling.by_row else (a.scale, b.scale)
        result = _product(a, b, x.dtype, fast=True)
        return result.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), scaling, (of_x, of_weight) = ctx.saved_tensors, ctx.scaling, ctx.scales
        rows, columns, contracted = scaling.rows, scaling.columns, scaling.contracted
        lead, given = gradients[0].shape[:-1], gradients[0].flatten(0, -2)
        scale, into_x, into_weight = None, None, None
        if weight is not None:
            a = scaling.cast(given, rows, columns, E5M2)
            b = scaling.cast(weight.t(), contracted, columns, scale=of_weight)
            into_x = _product(a, b, given.dtype, scaling.by_row).view(*lead, weight.shape[1])
            scale = None if scaling.by_row else a.scale
        if x is not None:
            a = scaling.cast(given.t(), columns, rows, E5M2, scale)
            b = scaling.cast(x.reshape(-1, x.shape[-1]).t(), contracted, rows, scale=of_x)
            into_weight = _product(a, b, given.dtype, scaling.by_row)
        return into_x, into_weight, None


def float8_linear(x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """Returns `F.linear` of this device's parts, multiplied in 8 bits.

    Where contracted elements are split, the result is a part of a sum, and so are the gradients of
    x and of the weight where the columns and the rows are.
    """
    result: Tensor = _Linear.apply(x, weight, scaling)  # type: ignore[no-untyped-call]
    return result

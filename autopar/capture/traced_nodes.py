"""Information about nodes traced by torch.export: the user's line, tensors and types."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import CaptureError
from autopar.ir.graph import Source
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import DTYPE_NAMES, tensor_type

# These draw random numbers in the memory order of their operand; others in dimension order.
BY_MASK = (
    "select with torch.where or a mask, which keeps the size; compute a mixture of experts by "
    "autopar.mixture"
)
_DRAWN = re.compile(
    r"aten\.((alpha_)?dropout|rand(int)?_like|uniform|exponential|geometric|cauchy|log_normal)_?\b"
)
_TORCH = os.path.dirname(torch.__file__)


def source_of(node: fx.Node) -> Source:
    """Returns the module and the line of the user's code that a traced node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"@\d+", "", stack[-1][0]) if stack else ""
    module = "" if path == "model" else path.removeprefix("model.")
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.*)', trace)
    for file, line, text in reversed(frames):
        if not file.startswith((_TORCH, "<")) and os.path.dirname(file) != os.path.dirname(
            __file__
        ):
            return Source(module, os.path.basename(file), int(line), text.strip())
    return Source(module)


def drawn_along(node: fx.Node, op: str) -> tuple[int, ...]:
    """Returns the dimensions in the order in which an operator draws; () for dimension order."""
    if not _DRAWN.match(op):
        return ()
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    strides = torch.empty_like(value, device="meta").stride()
    several = [dim for dim, size in enumerate(value.shape) if size > 1]
    order = iter(sorted(several, key=lambda dim: -strides[dim]))
    dims = tuple(next(order) if dim in several else dim for dim in range(value.dim()))
    return () if list(dims) == sorted(dims) else dims


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors among the results of a node."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in values if isinstance(item, Tensor)]


def type_of(value: Tensor) -> TensorType:
    """Returns the type of a traced tensor; raises CaptureError if a graph has no such type."""
    if not all(isinstance(size, int) for size in value.shape):
        raise CaptureError(
            f"a tensor of sizes {tuple(value.shape)}",
            why="its sizes depend on values, which are not known when a model is captured",
            todo=BY_MASK,
        )
    if value.layout is not torch.strided:
        raise CaptureError(
            f"a tensor of layout {value.layout}",
            why="a graph has dense tensors only",
            todo="convert it with to_dense() before it enters the model",
        )
    dtype_of(value.dtype)
    return tensor_type(value)


def dtype_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype; raises CaptureError if a graph has no such dtype."""
    if dtype not in DTYPE_NAMES:
        raise CaptureError(f"a tensor of {dtype}", todo="convert it to another dtype")
    return DTYPE_NAMES[dtype]

"""What one operator and one layout change allocate, forwards and backwards, on one device.

The results come from the layouts, what is kept for the backward from autograd itself (`Node.saved`
and `Node.saved_types`). What a backward makes follows from its derivative: a new tensor for each
operand, but for those whose gradient is the result's own. Where a derivative is computed in
several steps its temporaries are counted here, after torch's tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autopar.ir.collective import SUMS, Step
from autopar.ir.graph import Node
from autopar.ir.int8_blocks import staged
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Hop
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType
from autopar.operators.across import CHUNK
from autopar.operators.exchange import across
from autopar.operators.mixture import rows_near

# The gradient of these operands is that of the result, where the shapes are equal.
_PASSED_ON = {
    "aten.add.Tensor": (0, 1),
    "aten.sub.Tensor": (0,),
    "aten.clone": (0,),
    "aten.contiguous": (0,),
    "aten.reshape": (0,),
    "aten.view": (0,),
    # The gradient of both terms is one tensor.
    "kernels.add_rms_norm": (1,),
    "kernels.add_layer_norm": (1,),
}
# The gradient of every operand is a view of that of the result.
_VIEWED = ("aten.cat", "aten.sum", "aten.sum.dim_IntList", "autopar.detach", "aten.flatten")
# Views whose gradient is a tensor of its own: zeros around a part, a sum over repetitions.
_OWN_GRADIENT = ("aten.slice.Tensor", "aten.select.int", "aten.expand", "aten.narrow", "getitem")
# Across parts of a dimension these need a temporary like the result, others one like the operand.
_LOOK_UPS = ("aten.embedding", "aten.gather", "aten.index_select")
# Temporaries of the backward, in results.
_BACKWARD_STEPS = {
    "aten.pow.Tensor_Scalar": 2,
    "aten.rsqrt": 2,
    "aten.sqrt": 1,
    "aten.sin": 1,
    "aten.cos": 2,
    "aten.div.Tensor": 3,
}
# What kernels of accelerators keep instead of what torch's CPU code keeps, which `Node.saved_types`
# tells: operands (-1: the result), float32 numbers a row, and bytes an element of the result.
# Attention: Dao, "FlashAttention-2" (arXiv 2307.08691), section 3.1.2: the log-sum-exp of a row.
_KERNELS = {
    "aten.scaled_dot_product_attention": ((0, 1, 2, -1), 1, 0),
    "aten.rms_norm": ((0, 1), 1, 0),
    "aten.layer_norm": ((0, 1), 2, 0),
    "aten.dropout": ((), 0, 1),
}


@dataclass(frozen=True)
class Recipe:
    """One operator on one device, in bytes.

    Attributes:
        results: of each result.
        alias: the operand whose storage the results share, -1 for none.
        saved: operands kept for the backward, -1 for the result.
        extra: tensors kept that are no value of the graph.
        scratch, backward_scratch: what lives only while it runs.
        gradients: for each operand the bytes of a gradient of its own, 0 if it is the result's, -1
            if it has none.
    """

    results: tuple[float, ...]
    alias: int
    saved: tuple[int, ...]
    extra: tuple[float, ...]
    scratch: float
    gradients: tuple[float, ...]
    backward_scratch: float


def kept(node: Node, accelerator: bool = False) -> tuple[int, ...]:
    """The operands that `node` keeps for its backward, -1 for its result.

    `accelerator` says whether its kernels keep what those of accelerators do, not those of CPUs.
    """
    if accelerator and node.op in _KERNELS and (node.saved or node.saved_types):
        return tuple(place for place in _KERNELS[node.op][0] if place < len(node.inputs))
    places = (
        [-1] if name == node.name else [at for at, read in enumerate(node.inputs) if read == name]
        for name in node.saved
    )
    return tuple(itertools.chain.from_iterable(places))


def hands_on(node: Node, place: int, operand: Node) -> Literal["new", "same", "none"]:
    """Whether a backward makes a new tensor for an operand's gradient, or hands on its own.

    That is for layouts that do not change the shapes' relation; `recipe` knows the bytes.
    """
    size = _gradient(node, place, operand, operand.type.nbytes, node.type.nbytes)
    return "none" if size < 0 else "new" if size else "same"


def recipe(
    node: Node,
    operands: tuple[Node, ...],
    into: tuple[Layout, ...],
    out: tuple[Layout, ...],
    mesh: Mesh,
    accelerator: bool = False,
) -> Recipe:
    """What `node` allocates under its layouts.

    Args:
        node: an operator.
        operands: the nodes that it reads.
        into, out: layouts of operands and results.
        mesh: the devices.
        accelerator: whether its kernels keep what those of accelerators do, not those of CPUs.
    """
    types = tuple(operand.type for operand in operands)
    given = tuple(
        float(layout.local_bytes(tensor, mesh))
        for tensor, layout in zip(node.types, out, strict=True)
    )
    taken = tuple(
        float(layout.local_bytes(tensor, mesh)) for tensor, layout in zip(types, into, strict=False)
    )
    gradients = tuple(
        _gradient(node, place, operand, size, given[0])
        for place, (operand, size) in enumerate(zip(operands, taken, strict=False))
    )
    scratch, backward = 0.0, _backward_scratch(node, taken, given[0], gradients)
    if into and across(node, types, into):
        scratch = given[0] if node.op in _LOOK_UPS else taken[0]
    if node.op == "kernels.linear_cross_entropy":
        scratch = _chunk_of_logits(node, types, into, mesh)
    saved, rows = kept(node, accelerator), rows_near(node, types, into)
    if accelerator and node.op in _KERNELS and (node.saved or node.saved_types):
        _, numbers, each = _KERNELS[node.op]
        elements = given[0] / DTYPE_BYTES[node.type.dtype]
        width = out[0].local_shape(node.type.shape, mesh)[-1] if node.type.shape else 1
        extra: tuple[float, ...] = (4.0 * numbers * elements / max(width, 1) + each * elements,)
        if node.op == "aten.scaled_dot_product_attention":
            backward += 4.0 * elements  # the gradient of the queries is added up in float32
    else:
        near = [
            *rows,
            *((t.shape, x) for t, x in zip((*types, *node.types), (*into, *out), strict=False)),
        ]
        share = given[0] / (node.type.nbytes or 1)
        extra = tuple(_like(tensor, near, mesh, share) for tensor in node.saved_types)
    if rows:
        scratch, backward = _mixture_scratch(types, rows, gradients, mesh)
        scratch = 0.0 if node.keyword("kernels") else scratch  # added up as they are read
    if node.op == "aten.dropout" and not accelerator:
        # A CPU draws the mask of the whole tensor first: ones, noise and what comes of them.
        scratch = max(3.0 * node.type.nbytes - given[0] - sum(extra), 0.0)
    alias = node.inputs.index(node.alias) if node.alias in node.inputs else -1
    return Recipe(given, alias, saved, extra, scratch, gradients, backward)


def _chunk_of_logits(
    node: Node, types: tuple[TensorType, ...], into: tuple[Layout, ...], mesh: Mesh
) -> float:
    """What lives while the loss is made a chunk at a time, beside the gradients that are kept.

    The logits of a chunk, and the weight's gradient in at least f32, so far and of the chunk; what
    is kept of it comes when these go, or is the former.
    """
    (*rows, _), (words, features) = (
        layout.local_shape(tensor.shape, mesh)
        for tensor, layout in zip(types[:2], into[:2], strict=True)
    )
    size = DTYPE_BYTES[types[0].dtype]
    logits = float(min(CHUNK, math.prod(rows)) * words * size)
    return logits + (words * features * (2.0 * max(size, 4) - size) if node.requires_grad else 0.0)


def _mixture_scratch(
    types: tuple[TensorType, ...],
    rows: list[tuple[tuple[int, ...], Layout]],
    gradients: tuple[float, ...],
    mesh: Mesh,
) -> tuple[float, float]:
    """What every row adds to its token, in the dtype of the weights; backwards gradients of rows.

    Those are gone by the time when the last of the operands' gradients is there.
    """
    wide, narrow = (
        float(layout.local_bytes(TensorType(types[3].dtype, shape), mesh)) for shape, layout in rows
    )
    scaled = wide * DTYPE_BYTES[types[5].dtype] / DTYPE_BYTES[types[3].dtype]
    given = sum(size for size in gradients if size > 0)
    return scaled, max(3 * scaled - given, 2 * narrow - given, 0.0)


def _backward_scratch(
    node: Node, operands: tuple[float, ...], result: float, gradients: tuple[float, ...]
) -> float:
    """Bytes of temporaries of the backward."""
    if not node.requires_grad:
        return 0.0
    if node.op == "aten.cross_entropy_loss":
        return operands[0]  # the gradient of the log-softmax before that of the logits
    steps = _BACKWARD_STEPS.get(node.op, 0)
    if node.op in ("aten.mul.Tensor", "aten.div.Tensor"):
        steps += any(0 < size < result for size in gradients)  # before it is summed
    return result * steps


def _gradient(node: Node, place: int, operand: Node, size: float, result: float) -> float:
    """Bytes of the gradient of an operand: 0 if it needs none of its own, -1 if there is none."""
    if not (node.requires_grad and operand.requires_grad):
        return -1.0
    if node.op in _VIEWED or (place in _PASSED_ON.get(node.op, ()) and size == result):
        return 0.0
    if node.alias is not None and node.op not in _OWN_GRADIENT:
        return 0.0 if node.alias == operand.name else -1.0
    return size


def _like(
    tensor: TensorType,
    near: list[tuple[tuple[int, ...], Layout]],
    mesh: Mesh,
    share: float,
) -> float:
    """Local bytes of a tensor that an operator keeps, split as the dimensions it has in common.

    One that has none, whose dimensions are merged, is split as the result is.
    """
    best: tuple[int, float] = (0, tensor.nbytes * share)
    for shape, layout in near:
        for start in range(max(len(shape) - len(tensor.shape), 0) + 1):
            window = list(zip(shape[start:], layout.dims[start:], strict=True))
            if len(window) < len(tensor.shape):
                continue
            common, elements = 0, 1
            for size, (other, axes) in zip(tensor.shape, window, strict=False):
                if size == other:
                    common += 1
                    size = Layout((axes,)).local_shape((size,), mesh)[0]
                elif size != 1:
                    common = -len(shape)
                elements *= size
            if common > best[0]:
                best = (common, float(elements * DTYPE_BYTES[tensor.dtype]))
    return best[1]


@dataclass(frozen=True)
class Transfer:
    """One direction of a layout change in bytes: its result, None if it is a view, and staging."""

    result: float | None
    staging: float = 0.0


def transfers(
    step: Step, tensor: TensorType, mesh: Mesh, widened: Mapping[str, str] | None = None
) -> tuple[Transfer, Transfer]:
    """What a step allocates forwards and backwards, as the runtime's functions do.

    Blocks that are not in a row in memory are copied before they are sent or after they arrive.
    Where sums are made in another dtype (`widened`), they are sent in a copy of it.
    """
    wide = (widened or {}).get(tensor.dtype)
    factor = 0.0 if wide is None else DTYPE_BYTES[wide] / DTYPE_BYTES[tensor.dtype]
    forward, backward = _transfers(step, tensor, mesh)
    if factor and step.forward is not None and step.forward.kind in SUMS:
        forward = _summed(step, forward, tensor, mesh, factor)
    if factor and step.backward is not None and step.backward.kind in SUMS:
        back = replace(step, src=step.dst, dst=step.src)
        backward = _summed(back, backward, tensor, mesh, factor)
    return forward, backward


def _summed(
    step: Step, transfer: Transfer, tensor: TensorType, mesh: Mesh, factor: float
) -> Transfer:
    """A sum that is made in a copy, of so many times as many bytes: what is sent and what comes."""
    before, after = (float(layout.local_bytes(tensor, mesh)) for layout in (step.src, step.dst))
    sent = 0.0 if before == after else before  # an all_reduce overwrites what it sends
    return replace(transfer, staging=factor * (transfer.staging + sent + after))


def _transfers(step: Step, tensor: TensorType, mesh: Mesh) -> tuple[Transfer, Transfer]:
    if all(mesh.axis_size(axis) == 1 for axis in step.axes):
        return Transfer(None), Transfer(None)
    before, after = (float(layout.local_bytes(tensor, mesh)) for layout in (step.src, step.dst))
    view, forward_copy, backward_copy = Transfer(None), Transfer(after), Transfer(before)
    gather = Transfer(after, after if step.dim else 0.0)
    gather_back = Transfer(before, before if step.dim else 0.0)
    table = {
        "all_reduce": (forward_copy, view),
        "to_varying": (view, backward_copy),
        "from_varying": (view, backward_copy),
        "to_partial": (forward_copy, view),
        "reduce_scatter": (Transfer(after, before if step.dim else 0.0), gather_back),
        "all_gather": (gather, Transfer(before, after if step.dim else 0.0)),
        "all_gather_invariant": (gather, backward_copy),
        "slice_invariant": (forward_copy, gather_back),
        "slice_varying": (forward_copy, backward_copy),
        "all_to_all": (
            Transfer(after, (before if step.to_dim else 0.0) + (after if step.dim else 0.0)),
            Transfer(before, (after if step.dim else 0.0) + (before if step.to_dim else 0.0)),
        ),
    }
    return table[step.op]


def reduction_staging(
    hop: Hop, whole: float, part: float, mesh: Mesh, accelerator: bool, together: bool = False
) -> float:
    """What reducing a gradient needs beside what is sent and what comes of it, in bytes.

    Blocks of a row are put side by side, and several tensors into one buffer, which is sent in
    their place; gloo sums in a copy of that. An all_reduce sums in the buffer that comes of it.

    Args:
        hop: the collective, of one gradient.
        whole, part: bytes of the gradient before and after it.
        mesh: the devices.
        accelerator: whether they are no CPUs.
        together: whether it goes with other gradients.
    """
    if hop.call.kind == "all_reduce":
        return 0.0
    packed = (bool(hop.dim) + together) * whole
    summed = whole * (not (accelerator or hop.call.quantised))
    return max(packed - part, summed + staged(hop.call, mesh), 0.0)

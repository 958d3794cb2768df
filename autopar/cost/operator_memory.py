"""Memory that one operator or one layout change allocates on a device, forwards and backwards.

Layouts give the size of results; autograd itself says what is saved for the backward (`Node.saved`
and `Node.saved_types`). A backward allocates a new tensor for each operand, unless the operand's
gradient is the result's own. Temporaries of derivatives that take several steps are counted here,
after torch's tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autopar.ir.collective import SUMS, Step
from autopar.ir.compression import method_of
from autopar.ir.graph import Node
from autopar.ir.int8_blocks import staged
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Hop
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType
from autopar.operators.attention.sequence_forms import KINDS
from autopar.operators.device_work import CHUNK
from autopar.operators.exchange import exchanged, local_steps
from autopar.operators.expert_load import imbalance
from autopar.operators.form import Part
from autopar.operators.forms import form_named
from autopar.operators.mixture import by_name, dispatch_axes, rows_near
from autopar.operators.narrow.narrow_linear import is_narrow, narrow_scratch

# Operands whose gradient is the result's gradient if the shapes are equal.
_PASSED_ON = {
    "aten.add.Tensor": (0, 1),
    "aten.sub.Tensor": (0,),
    "aten.clone": (0,),
    "aten.contiguous": (0,),
    "aten.reshape": (0,),
    "aten.view": (0,),
    # Both terms share one gradient tensor.
    "kernels.add_rms_norm": (1,),
    "kernels.add_layer_norm": (1,),
}
# Every operand's gradient is a view of the result's gradient.
_VIEWED = ("aten.cat", "aten.sum", "aten.sum.dim_IntList", "autopar.detach", "aten.flatten")
_SHARE = "autopar.share"
_IN_PLACE = "inplace"  # a loss whose steps overwrite the logits, and whose gradient does
# Views whose gradient is a new tensor: zeros around a part, or a sum over repetitions.
_OWN_GRADIENT = ("aten.slice.Tensor", "aten.select.int", "aten.expand", "aten.narrow", "getitem")
# Over parts of a split dimension, these need a temporary of the result, others one of the operand.
_LOOK_UPS = ("aten.embedding", "aten.gather", "aten.index_select")
# Temporaries of the backward, as multiples of the result.
_BACKWARD_STEPS = {
    "aten.pow.Tensor_Scalar": 2,
    "aten.rsqrt": 2,
    "aten.sqrt": 1,
    "aten.sin": 1,
    "aten.cos": 2,
    "aten.div.Tensor": 3,
}
# Tensors that accelerator kernels save, not those of a CPU in `Node.saved_types`: operands (-1: the
# result), float32 values per row, bytes per element of the result. Attention: the lse of each row.
_KERNELS = {
    **dict.fromkeys(KINDS, ((0, 1, 2, -1), 1, 0)),
    "aten.rms_norm": ((0, 1), 1, 0),
    "aten.layer_norm": ((0, 1), 2, 0),
    "aten.dropout": ((), 0, 1),
}


@dataclass(frozen=True)
class Recipe:
    """Memory of one operator on one device, in bytes.

    Attributes:
        results: bytes of each result.
        alias: index of the operand whose storage the results share, -1 if none.
        saved: indices of operands saved for the backward, -1 for the result.
        extra: bytes of saved tensors that are not values of the graph.
        scratch, backward_scratch: bytes that live only while it runs.
        gradients: for each operand, bytes of its gradient; 0 if it is the result's gradient, -1 if
            there is none.
    """

    results: tuple[float, ...]
    alias: int
    saved: tuple[int, ...]
    extra: tuple[float, ...]
    scratch: float
    gradients: tuple[float, ...]
    backward_scratch: float


def kept(node: Node, accelerator: bool = False) -> tuple[int, ...]:
    """Returns the indices of operands that `node` saves for its backward, -1 for its result.

    Args:
        node: the operator.
        accelerator: whether it runs on an accelerator, whose kernels save other tensors than a
            CPU's.
    """
    if node.part.loss == _IN_PLACE:
        return (0, 1)  # the logits, which are their softmax by then, and the labels
    if accelerator and node.op in _KERNELS and (node.saved or node.saved_types):
        return tuple(place for place in _KERNELS[node.op][0] if place < len(node.inputs))
    places = (
        [-1] if name == node.name else [at for at, read in enumerate(node.inputs) if read == name]
        for name in node.saved
    )
    return tuple(itertools.chain.from_iterable(places))


def hands_on(node: Node, place: int, operand: Node) -> Literal["new", "same", "none"]:
    """Returns whether an operand's gradient is a new tensor, the result's gradient, or absent.

    Valid for layouts that keep the relation of the shapes; `recipe` gives the bytes.
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
    form: str = "",
) -> Recipe:
    """Returns the memory that `node` allocates under the given layouts.

    Args:
        node: an operator.
        operands: the nodes that it reads.
        into, out: layouts of operands and results.
        mesh: the devices.
        accelerator: whether it runs on an accelerator, whose kernels save other tensors than a
            CPU's.
        form: name of its implementation; "" for the operator without a form.
    """
    types = tuple(operand.type for operand in operands)
    given = tuple(
        float(layout.local_bytes(tensor, mesh))
        for tensor, layout in zip(node.types, out, strict=True)
    )
    if _inside(node) and node.alias is None:
        given = (0.0,) * len(given)
    taken = tuple(
        float(layout.local_bytes(tensor, mesh)) for tensor, layout in zip(types, into, strict=False)
    )
    gradients = tuple(
        _gradient(node, place, operand, size, given[0])
        for place, (operand, size) in enumerate(zip(operands, taken, strict=False))
    )
    scratch, backward = 0.0, _backward_scratch(node, taken, given[0], gradients)
    if form or (into and is_narrow(node)):
        part = Part(node, types, into, mesh)
        own = form_named(node.op, form).scratch(part) if form else narrow_scratch(part)
        scratch, backward = own[0], backward + own[1]
    elif into and local_steps(node, types, into):
        scratch = given[0] if node.op in _LOOK_UPS else taken[0]
    if node.op == "kernels.linear_cross_entropy":
        scratch = _chunk_of_logits(node, types, into, mesh)
    saved, rows = kept(node, accelerator), rows_near(node, types, into)
    if rows and (busy := imbalance(node, types[0], into[0], mesh)) > 1.0:
        rows = [((math.ceil(shape[0] * busy), *shape[1:]), layout) for shape, layout in rows]
    if accelerator and node.op in _KERNELS and (node.saved or node.saved_types):
        _, numbers, each = _KERNELS[node.op]
        elements = given[0] / DTYPE_BYTES[node.type.dtype]
        width = out[0].local_shape(node.type.shape, mesh)[-1] if node.type.shape else 1
        extra: tuple[float, ...] = (4.0 * numbers * elements / max(width, 1) + each * elements,)
        if node.op in KINDS:
            backward += 4.0 * elements  # the gradient of the queries accumulates in float32
    else:
        near = [
            *rows,
            *((t.shape, x) for t, x in zip((*types, *node.types), (*into, *out), strict=False)),
        ]
        share = given[0] / (node.type.nbytes or 1)
        types_beside = () if node.part.loss == _IN_PLACE else node.saved_types
        extra = tuple(_like(tensor, near, mesh, share) for tensor in types_beside)
    if rows:
        scratch, backward = _mixture_scratch(by_name(node, types), rows, gradients, mesh)
        # Kernels add rows while they read them.
        scratch = 0.0 if node.keyword("kernels") else scratch
        there, back = _dispatched(node, types, into, mesh, form)
        scratch, backward = scratch + there, backward + back
    if node.op == "aten.dropout" and not accelerator:
        # A CPU first draws the mask of the whole tensor: ones, noise and their comparison.
        scratch = max(3.0 * node.type.nbytes - given[0] - sum(extra), 0.0)
    alias = node.inputs.index(node.alias) if node.alias in node.inputs else -1
    return Recipe(given, alias, saved, extra, scratch, gradients, backward)


def _chunk_of_logits(
    node: Node, types: tuple[TensorType, ...], into: tuple[Layout, ...], mesh: Mesh
) -> float:
    """Returns the temporary bytes of a loss in chunks, without the gradients that it keeps.

    These are the logits of a chunk and two gradients of the weight in at least f32: accumulated,
    and of the chunk. The gradient that is kept is the accumulated one, or is allocated after it is
    freed.
    """
    (*rows, _), (words, features) = (
        layout.local_shape(tensor.shape, mesh)
        for tensor, layout in zip(types[:2], into[:2], strict=True)
    )
    size = DTYPE_BYTES[types[0].dtype]
    logits = float(min(CHUNK, math.prod(rows)) * words * size)
    return logits + (words * features * (2.0 * max(size, 4) - size) if node.requires_grad else 0.0)


def _mixture_scratch(
    types: dict[str, TensorType],
    rows: list[tuple[tuple[int, ...], Layout]],
    gradients: tuple[float, ...],
    mesh: Mesh,
) -> tuple[float, float]:
    """Returns the temporary bytes forwards and backwards of a mixture of experts.

    Forwards: each row's contribution to its token, in the dtype of the weights. Backwards: the
    gradients of rows, which are freed before the last operand's gradient is allocated.
    """
    wide, narrow = (
        float(layout.local_bytes(TensorType(types["x"].dtype, shape), mesh))
        for shape, layout in rows
    )
    scaled = wide * DTYPE_BYTES[types["weights"].dtype] / DTYPE_BYTES[types["x"].dtype]
    given = sum(size for size in gradients if size > 0)
    return scaled, max(3 * scaled - given, 2 * narrow - given, 0.0)


def _dispatched(
    node: Node, types: tuple[TensorType, ...], into: tuple[Layout, ...], mesh: Mesh, form: str
) -> tuple[float, float]:
    """Returns the bytes of tokens that are sent to experts, forwards and backwards.

    Those that arrive in a hop stay until its results leave; forwards what is sent in one hop is
    beside them. Backwards the gradients of results arrive, and those of tokens leave later.
    """
    if not dispatch_axes(node, into):
        return 0.0, 0.0
    sides = exchanged(node, types, into, mesh, form)
    hops = len(sides[1]) // 2 or len(sides[0]) // 3
    arrived = [call.nbytes for call in sides[0][1 : 2 * hops : 2]]
    return float(sum(arrived) + max(arrived)), float(sum(c.nbytes for c in sides[1][:hops]))


def _backward_scratch(
    node: Node, operands: tuple[float, ...], result: float, gradients: tuple[float, ...]
) -> float:
    """Returns the bytes of the backward's temporaries."""
    if not node.requires_grad or node.part.fused:
        return 0.0
    if node.op == "aten.cross_entropy_loss":
        # Gradient of the log-softmax, before that of the logits; step by step its product as well.
        return operands[0] * {"steps": 2, _IN_PLACE: 0}.get(node.part.loss, 1)
    steps = _BACKWARD_STEPS.get(node.op, 0)
    if node.op in ("aten.mul.Tensor", "aten.div.Tensor"):
        steps += any(0 < size < result for size in gradients)  # before it is summed
    return result * steps


def _gradient(node: Node, place: int, operand: Node, size: float, result: float) -> float:
    """Returns the bytes of an operand's gradient: 0 if shared with the result's, -1 if none."""
    if not (node.requires_grad and operand.requires_grad):
        return -1.0
    if _inside(operand):
        return 0.0
    if node.part.loss == _IN_PLACE and place == 0:
        return 0.0
    if node.op in _VIEWED or (place in _PASSED_ON.get(node.op, ()) and size == result):
        return 0.0
    if node.alias is not None and node.op not in _OWN_GRADIENT:
        return 0.0 if node.alias == operand.name else -1.0
    return size


def _inside(node: Node) -> bool:
    """Returns whether a value lives inside a kernel only, and takes no memory."""
    return node.part.fused and not node.part.readers and node.op != _SHARE


def _like(
    tensor: TensorType,
    near: list[tuple[tuple[int, ...], Layout]],
    mesh: Mesh,
    share: float,
) -> float:
    """Returns the local bytes of a saved tensor, split like the dimensions that it has in common.

    A tensor with merged dimensions, which has none in common, is split like the result.
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
    """Bytes of one direction of a layout change: its result (None if a view) and staging."""

    result: float | None
    staging: float = 0.0


def transfers(
    step: Step, tensor: TensorType, mesh: Mesh, widened: Mapping[str, str] | None = None
) -> tuple[Transfer, Transfer]:
    """Returns the bytes that a step allocates forwards and backwards in the runtime's functions.

    Blocks that are not contiguous are copied before sending or after receiving. Sums in another
    dtype (`widened`) are sent as a copy in that dtype.
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
    """Returns the bytes of a sum computed in a copy `factor` times as large."""
    before, after = (float(layout.local_bytes(tensor, mesh)) for layout in (step.src, step.dst))
    sent = 0.0 if before == after else before  # an all_reduce works in place
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
    """Returns the staging bytes of a gradient reduction, without its input and output.

    Blocks of a row are packed, and several tensors are packed into one buffer that is sent instead;
    gloo sums in a copy of that. An all_reduce sums in its output buffer.

    Args:
        hop: the collective of one gradient.
        whole, part: bytes of the gradient before and after it.
        mesh: the devices.
        accelerator: whether the devices are accelerators rather than CPUs.
        together: whether other gradients are sent in the same call.
    """
    if hop.call.compression:
        if method_of(hop.call.compression).feedback:  # with the residual, while decoding
            return 2 * whole + staged(hop.call, mesh)
        # The message that is sent, and received messages before and after decoding.
        return bool(hop.dim) * whole + hop.call.nbytes + staged(hop.call, mesh)
    if hop.call.kind == "all_reduce":
        return 0.0
    packed = (bool(hop.dim) + together) * whole
    summed = whole * (not accelerator)
    return max(packed - part, summed, 0.0)

"""Operators that communicate when a dimension is split: their local calls, and their messages.

Most operators run unchanged on shards. The operators of this file need more if a dimension that
they reduce or index is split: an offset (an embedding table), a sum over all shards (softmax), or a
neighbour's border (a convolution). On each device they become a call of a method of
`sharded_operators.py`; `exchanged` returns the communication of that method, for prices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.ir.collective import Collective
from autopar.ir.graph import Arg, Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.rewrite import argument
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType
from autopar.operators.device_work import CHUNK
from autopar.operators.dispatch import dispatch_messages
from autopar.operators.expert_load import PRICED
from autopar.operators.form import Part
from autopar.operators.forms import form_named
from autopar.operators.mixture import MIXTURE, dispatch_axes
from autopar.operators.narrow import narrow_linear
from autopar.operators.window import halos, windowed, without_padding

Types = tuple[TensorType, ...]
Layouts = tuple[Layout, ...]
Kwargs = tuple[tuple[str, Arg], ...]
_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class _Look:
    """The sharded call of an operator that reduces or indexes dimensions of an operand.

    Attributes:
        method: method of `ShardedOperators`.
        dims: returns these dimensions, given the node and its operand types.
        write: returns the arguments of the method except `axis` and `size`.
        sized: whether the method needs the global size of the dimension.
        operand: index of the operand, usually the first.
        forward, backward: its all_reduces: number of values per row, and their dtype: "" for the
            operand's dtype, "wide" for that dtype widened to at least f32. A row is one index into
            all other dimensions.
    """

    method: str
    dims: Callable[[Node, Types], tuple[int, ...]]
    write: Callable[[Node], tuple[tuple[Arg, ...], Kwargs]]
    sized: bool = False
    forward: tuple[tuple[int, str], ...] = ()
    backward: tuple[tuple[int, str], ...] = ()
    operand: int = 0


def local_steps(node: Node, types: Types, operands: Layouts, form: str = "") -> tuple[Node, ...]:
    """Returns the steps of one device for `node`, if it reduces or indexes a split dimension.

    Args:
        node: an operator with global shapes.
        types, operands: types and layouts of the tensors it reads.
        form: name of its implementation; "" for the operator itself.

    Returns:
        Nodes that call methods of `ShardedOperators` ("mesh.embedding", with `axis`). The last one
        has the name of `node`. Empty if the operator runs unchanged on its shards.
    """
    if form:
        return (form_named(node.op, form).call(node, types, operands),)
    if narrow_linear.is_narrow(node):
        return (narrow_linear.call(node, operands),)
    if windowed(node):
        return _with_halos(node, types, operands)
    look = _LOOKS.get(node.op)
    axes = _axes(look, node, types, operands) if look is not None else ()
    if look is None or not axes:
        return ()
    args, kwargs = look.write(node)
    more: Kwargs = (("axis", _one(axes)),)
    if look.sized:
        (dim,) = look.dims(node, types)
        more += (("size", types[look.operand].shape[dim]),)
    if node.op == MIXTURE and (over := dispatch_axes(node, operands)):
        more += (("over", over[0] if len(over) == 1 else tuple((axis,) for axis in over)),)
    return (replace(node, op=f"mesh.{look.method}", args=args, kwargs=(*kwargs, *more)),)


def exchanged(
    node: Node, types: Types, operands: Layouts, mesh: Mesh, form: str = ""
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Returns the operator's own collectives under these layouts, forwards and backwards.

    `form` names its implementation; "" means the operator itself.
    """
    if form:
        forward, backward = form_named(node.op, form).sends(Part(node, types, operands, mesh))
        return forward, backward if node.requires_grad else ()
    if narrow_linear.is_narrow(node):
        forward, backward = narrow_linear.messages(Part(node, types, operands, mesh))
        return forward, backward if node.requires_grad else ()
    if windowed(node):
        return _borders(node, types, operands, mesh)
    look = _LOOKS.get(node.op)
    axes = _axes(look, node, types, operands) if look is not None else ()
    if look is None or not axes:
        return (), ()
    if node.op == MIXTURE:
        hops = tuple((axis,) for axis in dispatch_axes(node, operands))
        forward, backward = dispatch_messages(Part(node, types, operands, mesh), hops)
        return forward, backward if node.requires_grad else ()
    if look.method == "linear_cross_entropy":
        return _chunks(axes, operands[2].local_shape(types[2].shape, mesh)), ()
    looked = look.dims(node, types)
    shape = operands[0].local_shape(types[0].shape, mesh)
    rows = 1
    for dim, size in enumerate(shape):
        rows *= 1 if dim in looked else size
    own = types[0].dtype
    names = {"": own, "wide": "f32" if own in ("f16", "bf16") else own}
    calls = [
        tuple(
            Collective("all_reduce", axes, rows * count * DTYPE_BYTES[names.get(dtype, dtype)])
            for count, dtype in numbers
        )
        for numbers in (look.forward, look.backward)
    ]
    if node.op == "aten.cross_entropy_loss" and argument(node, 5, "label_smoothing", 0.0):
        most, sums = calls[0]
        calls[0] = (most, replace(sums, nbytes=sums.nbytes // 2 * 3))
    return calls[0], calls[1] if node.requires_grad else ()


def _chunks(axes: tuple[str, ...], rows: tuple[int, ...]) -> tuple[Collective, ...]:
    """Returns the collectives for three float32 numbers per row, a chunk of rows at a time."""
    count, nbytes = math.prod(rows), 3 * DTYPE_BYTES["f32"]
    sizes = (min(CHUNK, count - start) for start in range(0, count, CHUNK))
    return tuple(Collective("all_gather", axes, size * nbytes) for size in sizes)


def _one(axes: tuple[str, ...]) -> Arg:
    """Returns one axis as its name, several axes as a tuple."""
    return axes[0] if len(axes) == 1 else axes


def _axes(look: _Look, node: Node, types: Types, operands: Layouts) -> tuple[str, ...]:
    """Returns the mesh axes that split the dimensions that the operator reduces or indexes."""
    return tuple(
        axis for dim in look.dims(node, types) for axis in operands[look.operand].dims[dim]
    )


def _with_halos(node: Node, types: Types, operands: Layouts) -> tuple[Node, ...]:
    """Returns the exchange of borders, followed by the operator without padding at the borders."""
    steps: list[Node] = []
    value = node.args[0]
    split = {dim: halo for dim, halo in halos(node, types).items() if operands[0].dims[dim]}
    for dim, halo in split.items():
        args = (value, dim, halo.before, halo.after, *((halo.fill,) if halo.fill else ()))
        name = f"{node.name}_halo{len(steps) or ''}"
        kwargs: Kwargs = (("axis", _one(operands[0].dims[dim])),)
        step = replace(node, name=name, op="mesh.halo", args=args, kwargs=kwargs, types=types[:1])
        steps.append(step)
        value = Ref(name)
    if not steps:
        return ()
    return (*steps, without_padding(node, value, types, frozenset(split)))


def _borders(
    node: Node, types: Types, operands: Layouts, mesh: Mesh
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Returns one message for each side at which a border is needed."""
    shape = list(operands[0].local_shape(types[0].shape, mesh))
    calls = []
    for dim, halo in halos(node, types).items():
        if not operands[0].dims[dim]:
            continue
        for width in (halo.before, halo.after):
            if width > 0:
                border = TensorType(types[0].dtype, (*shape[:dim], width, *shape[dim + 1 :]))
                calls.append(Collective("send", operands[0].dims[dim], border.nbytes))
        shape[dim] += halo.before + halo.after
    return tuple(calls), tuple(calls) if node.requires_grad else ()


def _dim(position: int) -> Callable[[Node, Types], tuple[int, ...]]:
    """Returns the dimension in argument `position`."""

    def dims(node: Node, types: Types) -> tuple[int, ...]:
        at = argument(node, position, "dim")
        rank = len(types[0].shape)
        return (at % rank,) if isinstance(at, int) and rank else ()

    return dims


def _some(node: Node, types: Types) -> tuple[int, ...]:
    """Returns the dimensions in the second argument, all if there are none."""
    named, rank = argument(node, 1, "dim"), len(types[0].shape)
    numbers = named if isinstance(named, tuple) else () if named is None else (named,)
    return tuple(int(str(n)) % rank for n in numbers if rank) or tuple(range(rank))


def _every(node: Node, types: Types) -> tuple[int, ...]:
    return tuple(range(len(types[0].shape)))


def _classes(node: Node, types: Types) -> tuple[int, ...]:
    """Returns the dimension of classes of (class), (sample, class) or (sample, class, ...)."""
    if types[1].floating:  # class probabilities
        return ()
    return (1,) if len(types[0].shape) > 1 else (0,)


def _as_is(node: Node) -> tuple[tuple[Arg, ...], Kwargs]:
    return node.args, node.kwargs


def _mixture(node: Node) -> tuple[tuple[Arg, ...], Kwargs]:
    return node.args, tuple(pair for pair in node.kwargs if pair[0] not in PRICED)


def _embedding(node: Node) -> tuple[tuple[Arg, ...], Kwargs]:
    padding = argument(node, 2, "padding_idx", -1)
    return (*node.args[:2], *((padding,) if padding != -1 else ())), ()


def _gather(node: Node) -> tuple[tuple[Arg, ...], Kwargs]:
    return node.args[:3], ()


def _loss(node: Node) -> tuple[tuple[Arg, ...], Kwargs]:
    """Returns the arguments of a labelled loss, without those that have their defaults."""
    weight = argument(node, 2, "weight")
    reduction = argument(node, 3, "reduction", 1)
    kwargs: Kwargs = (("reduction", _REDUCTIONS[int(str(reduction))]),)
    for position, name, idle in ((4, "ignore_index", -100), (5, "label_smoothing", 0.0)):
        given = argument(node, position, name, idle)
        kwargs += ((name, given),) if given != idle else ()
    return (*node.args[:2], *(() if weight is None else (weight,))), kwargs


_ROW, _WIDE = (1, ""), (1, "wide")
_INDEX = (1, "i64")
_FIRST = (_ROW, _INDEX)  # the maximum, and its first index
_LOOKS = {
    "aten.embedding": _Look("embedding", lambda node, types: (0,), _embedding, True),
    "aten.gather": _Look("gather", _dim(1), _gather, True),
    "aten.index_select": _Look("index_select", _dim(1), _as_is, True),
    MIXTURE: _Look("mixture", lambda node, types: (0,), _mixture, True),
    "aten.nll_loss": _Look("nll_loss", _classes, _loss, True),
    "aten.nll_loss_nd": _Look("nll_loss", _classes, _loss, True),
    "aten.cross_entropy_loss": _Look(
        "cross_entropy", _classes, _loss, True, forward=(_WIDE, (2, "wide"))
    ),
    "kernels.linear_cross_entropy": _Look(
        "linear_cross_entropy", lambda node, types: (0,), _as_is, True, operand=1
    ),
    "aten.softmax.int": _Look("softmax", _dim(1), _as_is, False, (_WIDE, _WIDE), (_WIDE,)),
    "aten.log_softmax.int": _Look("log_softmax", _dim(1), _as_is, False, (_WIDE, _WIDE), (_WIDE,)),
    "aten.logsumexp": _Look("logsumexp", _some, _as_is, False, (_WIDE, _WIDE)),
    "aten.amax": _Look("amax", _some, _as_is, False, (_ROW, _INDEX)),
    "aten.amin": _Look("amin", _some, _as_is, False, (_ROW, _INDEX)),
    "aten.max": _Look("amax", _every, _as_is, False, (_ROW, _INDEX)),
    "aten.min": _Look("amin", _every, _as_is, False, (_ROW, _INDEX)),
    "aten.max.dim": _Look("max", _dim(1), _as_is, True, (*_FIRST, _ROW)),
    "aten.min.dim": _Look("min", _dim(1), _as_is, True, (*_FIRST, _ROW)),
    "aten.argmax": _Look("argmax", _dim(1), _as_is, True, _FIRST),
    "aten.argmin": _Look("argmin", _dim(1), _as_is, True, _FIRST),
}

"""Passes that remove no-ops and give each operation one spelling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.rewrite import Editor, argument, dimension, number, rewrite
from autopar.ir.splits import SPLITS

_RESHAPES = {
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.view_as", "aten.reshape_as",
    "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze", "aten.squeeze.dim",
    "aten.squeeze.dims",
}  # fmt: skip
_EXPANDS = {"aten.expand", "aten.expand_as", "aten.broadcast_to"}
_TRANSPOSES = {"aten.transpose.int", "aten.swapaxes", "aten.swapdims", "aten.t", "aten.numpy_T",
               "aten.mT"}  # fmt: skip
_CASTS = {"aten._to_copy", "aten.type_as"}
_SAME = {"aten.alias", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.contiguous", "aten.clone",
         "autopar.share"}  # fmt: skip
_DROPOUTS = {"aten.dropout", "aten.feature_dropout", "aten.alpha_dropout",
             "aten.feature_alpha_dropout"}  # fmt: skip
# Operators that read only dtype and shape of their operand, so that it need not exist or be whole.
_FILLS = {
    "aten.new_zeros": "aten.zeros", "aten.zeros_like": "aten.zeros",
    "aten.new_ones": "aten.ones", "aten.ones_like": "aten.ones",
    "aten.new_full": "aten.full", "aten.full_like": "aten.full",
    "aten.zero": "aten.zeros", "aten.fill.Scalar": "aten.full",
    "aten.new_empty": "aten.empty.memory_format",
}  # fmt: skip
# Operator -> the number on its right that changes nothing.
_NEUTRAL = {
    "aten.add.Tensor": 0, "aten.sub.Tensor": 0, "aten.add.Scalar": 0, "aten.sub.Scalar": 0,
    "aten.mul.Tensor": 1, "aten.div.Tensor": 1, "aten.mul.Scalar": 1, "aten.div.Scalar": 1,
    "aten.pow.Tensor_Scalar": 1,
}  # fmt: skip
Simplifier = Callable[[Node, Editor], Node | Ref | None]


def drop_identities(graph: Graph) -> Graph:
    """Returns `graph` without operators that change no value, and with one spelling for each view.

    Removed are copies, contiguous, casts to the same dtype, views to the same shape, dropout that
    drops nothing, empty operands of a cat, arithmetic with 0 or 1, detach of values without
    gradient, the operand of zeros_like and similar, and shares, which are inserted again at the
    end.

    Views get known sizes and one spelling: `aten.reshape`, which is legal on any strides,
    `aten.expand`, `aten.transpose.int`, `aten.slice.Tensor(x, dim, start, end)`; casts are
    `aten.to.dtype(x, dtype)`.
    """

    def simplify(node: Node, editor: Editor) -> Node | Ref | None:
        first = node.args[0] if node.args else None
        if node.is_leaf or not isinstance(first, (Ref, tuple)) or len(node.types) != 1:
            return None
        return _simplified(node, editor)

    return rewrite(graph, simplify)


def _simplified(node: Node, editor: Editor) -> Node | Ref | None:
    first = node.args[0]
    if isinstance(first, tuple):
        return _cat(node, editor) if node.op in ("aten.cat", "aten.concat") else None
    assert isinstance(first, Ref)
    same = editor[first.name].types == node.types
    shape = node.type.shape
    if node.op in _SAME:
        return None if "channels_last" in str(node.keyword("memory_format")) else first
    if node.op in _CASTS or node.op.startswith("aten.to."):
        return first if same else _spelled(node, "aten.to.dtype", Name(node.type.dtype))
    if node.op in _FILLS:
        return _filled(node)
    if node.op in _RESHAPES:
        return _round_trip(node, first, editor) or _spelled(node, "aten.reshape", shape)
    if node.op in _EXPANDS:
        return first if same else _spelled(node, "aten.expand", shape)
    if node.op in ("aten.slice.Tensor", "aten.narrow"):
        return first if same else _slice(node, editor)
    if node.op in _TRANSPOSES:
        return _transpose(node)
    if node.op == "aten.permute":
        order = node.args[1]
        assert isinstance(order, tuple)
        dims = tuple(dimension(dim, len(order)) for dim in order)
        plain = dims == tuple(range(len(dims)))
        return first if plain else _spelled(node, "aten.permute", dims)
    if node.op in _DROPOUTS:
        idle = argument(node, 1, "p") == 0 or argument(node, 2, "train") is False
        return first if idle else None
    if node.op in ("autopar.detach", "aten.detach"):
        return None if editor[first.name].requires_grad else first
    other = node.args[1] if len(node.args) > 1 else None
    neutral = isinstance(other, (int, float)) and other == _NEUTRAL.get(node.op)
    return first if neutral and same and not node.keyword("rounding_mode") else None


def _filled(node: Node) -> Node | None:
    """Returns zeros, ones or full with the result's own type."""
    args: tuple[Arg, ...] = (node.type.shape,)
    if _FILLS[node.op] == "aten.full":
        value = argument(node, 2 if node.op == "aten.new_full" else 1, "fill_value")
        if isinstance(value, Ref):
            return None
        args = (*args, value)
    kwargs = (("dtype", Name(node.type.dtype)),)
    return replace(node, op=_FILLS[node.op], args=args, kwargs=kwargs, requires_grad=False)


def _spelled(node: Node, op: str, *rest: Name | int | tuple[int, ...]) -> Node:
    return replace(node, op=op, args=(node.args[0], *rest), kwargs=())


def _round_trip(node: Node, first: Ref, editor: Editor) -> Ref | None:
    """Returns the value of this same type from which a chain of reshapes leads to `node`."""
    source = editor[first.name]
    while source.types != node.types:
        if source.op != "aten.reshape" or not isinstance(source.args[0], Ref):
            return None
        source = editor[source.args[0].name]
    return Ref(source.name)


def _slice(node: Node, editor: Editor) -> Node | None:
    shape = editor[node.inputs[0]].type.shape
    dim = dimension(argument(node, 1, "dim"), len(shape))
    start = argument(node, 2, "start")
    if isinstance(start, Ref):
        return None
    start = number(start, 0)
    start = min(start + shape[dim] if start < 0 else start, shape[dim])
    step = number(argument(node, 4, "step"), 1) if node.op == "aten.slice.Tensor" else 1
    if step != 1:
        return None
    return _spelled(node, "aten.slice.Tensor", dim, max(start, 0), start + node.type.shape[dim])


def _transpose(node: Node) -> Node | Ref | None:
    rank = len(node.type.shape)
    if node.op in ("aten.t", "aten.numpy_T") and rank != 2:
        return None
    a, b = (argument(node, 1, "dim0", -2), argument(node, 2, "dim1", -1))
    a, b = sorted((dimension(a, rank), dimension(b, rank)))
    first = node.args[0]
    if a == b and isinstance(first, Ref):
        return first
    return _spelled(node, "aten.transpose.int", a, b)


def _cat(node: Node, editor: Editor) -> Node | Ref | None:
    """Drops operands without elements."""
    parts = node.args[0]
    assert isinstance(parts, tuple)
    types = [editor[part.name].type for part in parts if isinstance(part, Ref)]
    if len(types) != len(parts) or any(kind.dtype != node.type.dtype for kind in types):
        return None
    kept = tuple(part for part, kind in zip(parts, types, strict=True) if kind.numel)
    if len(kept) == len(parts) > 1 or not kept:
        return None
    if len(kept) == 1 and isinstance(kept[0], Ref):
        return kept[0]
    return replace(node, args=(kept, *node.args[1:]))


def lower_splits(graph: Graph) -> Graph:
    """Returns `graph` with each split as `aten.slice.Tensor`s, each unbind as `aten.select.int`s.

    Results of `aten.broadcast_tensors`, with which torch's losses of two tensors begin, become an
    `aten.expand` or the operand itself.
    """

    def lower(node: Node, editor: Editor) -> Node | Ref | None:
        if node.op != "getitem":
            return None
        whole, index = editor[node.inputs[0]], number(node.args[1], 0)
        if whole.op == "aten.broadcast_tensors":
            part = Ref(whole.inputs[index])
            if editor[part.name].types == node.types:
                return part
            return replace(node, op="aten.expand", args=(part, node.type.shape), kwargs=())
        if whole.op != "aten.unbind.int" and whole.op not in SPLITS:
            return None
        if not isinstance(whole.args[0], Ref):
            return None
        source = editor[whole.args[0].name].type
        if whole.op == "aten.unbind.int":
            dim = dimension(argument(whole, 1, "dim"), len(source.shape))
            place = index % len(whole.types)
            return replace(node, op="aten.select.int", args=(whole.args[0], dim, place), kwargs=())
        dim = dimension(argument(whole, SPLITS[whole.op], "dim"), len(source.shape))
        index %= len(whole.types)
        start = sum(kind.shape[dim] for kind in whole.types[:index])
        end = start + whole.types[index].shape[dim]
        if (start, end) == (0, source.shape[dim]):
            return whole.args[0]
        args = (whole.args[0], dim, start, end)
        return replace(node, op="aten.slice.Tensor", args=args, kwargs=())

    return rewrite(graph, lower)

"""In-place writes of a traced program: what they write, as new values, and back through views."""

from __future__ import annotations

import operator
import re
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Ref

# Views whose elements stand in the order of the elements they look at.
_RESHAPES = re.compile(
    r"aten\.(_unsafe_view|view|view_as|reshape|reshape_as|flatten|unflatten|squeeze|unsqueeze)_?\b"
)
_PIECES = re.compile(r"aten\.(unsafe_)?(split|split_with_sizes|chunk|tensor_split|unbind)\b")
# In-place operators whose functional twins have names of their own.
_TWINS = {
    "aten.transpose_": "aten.transpose.int",
    "aten.normal_": "aten.normal_functional",
    "aten.bernoulli_.float": "aten.bernoulli.p",
}
_TRANSPOSES = re.compile(r"aten\.(transpose|t|swapaxes|swapdims|mT|numpy_T)_?\b")


def is_write(node: fx.Node) -> bool:
    """Whether a traced operator changes elements of a tensor, which must be its first argument.

    Operators that change shapes and strides only (`unsqueeze_`) are views. A batch norm's running
    figures do not count: torch declares them as plain arguments.

    Raises:
        CaptureError: it writes into something else than its first argument.
    """
    # Private but old; only a schema tells what an operator of another library writes.
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
        return False
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    if written.index(True) != 0 or sum(written) != 1 or not isinstance(node.args[0], fx.Node):
        raise CaptureError(
            f"{node.target} writes its results into given tensors",
            todo="use the operation without out= or _foreach_",
        )
    return True


def complete(node: fx.Node) -> None:
    """Give an operator whose functional twin has other defaults all its positional arguments."""
    if str(node.target).removesuffix(".default") in _TWINS:
        arguments = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
        defaults = (argument.default_value for argument in arguments if not argument.kwarg_only)
        node.args = (*node.args, *defaults)


def functional_name(op: str) -> str:
    """ "aten.add_.Tensor" -> "aten.add.Tensor"."""
    if op.removesuffix(".default") in _TWINS:
        return _TWINS[op.removesuffix(".default")]
    return re.sub(r"_(?=\.|$)", "", op, count=1)


def functional_result(node: fx.Node) -> Tensor:
    """A fake tensor like the one that the functional twin of an in-place operator returns.

    Raises:
        AttributeError: there is no such operator.
    """
    name = functional_name(str(node.target))
    twin: Any = reduce(getattr, name.split("."), torch.ops)
    operands, keywords = fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
    result: Tensor = twin(*operands, **keywords)
    return result


def writes_out(node: fx.Node) -> bool:
    """Whether a traced operator only writes its one result into a tensor that is given as `out`."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or "out" not in node.kwargs:
        return False
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return written == ["out"] and _returning(node) is not None


def _returning(node: fx.Node) -> Any:
    """The overload that takes what an overload with `out` takes, and returns the result."""
    target: Any = node.target
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        schema = overload._schema
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == wanted:
            return overload
    return None


def without_out(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The operator that returns what `node` writes into `out`, and a copy into it.

    Raises:
        CaptureError: `out` has another shape, and would be resized.
    """
    kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    target, out = _returning(node), node.kwargs["out"]
    assert isinstance(out, fx.Node)
    operands, keywords = fx.node.map_arg((node.args, kwargs), lambda item: item.meta["val"])
    value = target(*operands, **keywords)
    if value.shape != out.meta["val"].shape:
        raise CaptureError(
            f"{node.target} resizes the tensor that it writes into",
            todo="use the operation without out=",
        )
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, node.args, kwargs)
        copy = node.graph.call_function(torch.ops.aten.copy_.default, (out, made))
    made.meta, copy.meta = {**node.meta, "val": value}, dict(node.meta)
    return made, copy


def put_back(view: fx.Node, parent: Tensor, old: Ref, new: Ref) -> tuple[str, tuple[Arg, ...]]:
    """The operator and its arguments that give a tensor's value once a view of it is overwritten.

    Args:
        view: the traced operator that made the view.
        parent: a fake tensor like the one that is looked at.
        old, new: the value that was looked at, and the view's new value.

    Raises:
        CaptureError: the view is of a kind that cannot be put back.
    """
    op = str(view.target)
    rest: tuple[Any, ...]
    rest = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in view.args[1:])
    sizes = tuple(map(int, parent.shape))
    if op == "aten.slice.Tensor":
        return "aten.slice_scatter", (old, new, *rest)
    if op == "aten.select.int":
        return "aten.select_scatter", (old, new, *rest)
    if _TRANSPOSES.match(op):
        return functional_name(op.removesuffix(".default")), (new, *rest)
    if op == "aten.permute.default":
        order = [int(dim) % len(sizes) for dim in view.args[1]]  # type: ignore[union-attr, arg-type]
        return "aten.permute", (new, tuple(map(order.index, range(len(sizes)))))
    if view.target is operator.getitem and _PIECES.match(str(view.args[0].target)):  # type: ignore[union-attr]
        return _put_back_piece(view, old, new)
    value = view.meta["val"]
    if _RESHAPES.match(op):
        return "aten.reshape", (new, sizes)
    if (value.shape, value.stride()) == (parent.shape, parent.stride()):
        return "aten.alias", (new,)
    raise CaptureError(
        f"a tensor is written through its view {op}",
        todo="write through slices, transposes or reshapes, or make a new tensor",
    )


def _put_back_piece(view: fx.Node, old: Ref, new: Ref) -> tuple[str, tuple[Arg, ...]]:
    """The same for one of the pieces that a tensor is cut into."""
    whole, index = view.args
    assert isinstance(whole, fx.Node)
    assert isinstance(index, int)
    pieces = whole.meta["val"]
    at = 1 if "unbind" in str(whole.target) else 2
    dim = whole.args[at] if len(whole.args) > at else whole.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    if at == 1:
        return "aten.select_scatter", (old, new, dim, index)
    sizes = [int(piece.shape[dim]) for piece in pieces]
    start = sum(sizes[:index])
    return "aten.slice_scatter", (old, new, dim, start, start + sizes[index])

"""In-place writes of a traced program: what they write, as new values, and back through views."""

from __future__ import annotations

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


def functional_name(op: str) -> str:
    """ "aten.add_.Tensor" -> "aten.add.Tensor"."""
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
    value = view.meta["val"]
    if _RESHAPES.match(op):
        return "aten.reshape", (new, sizes)
    if (value.shape, value.stride()) == (parent.shape, parent.stride()):
        return "aten.alias", (new,)
    raise CaptureError(
        f"a tensor is written through its view {op}",
        todo="write through slices, transposes or reshapes, or make a new tensor",
    )

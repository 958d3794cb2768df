"""Replaces in-place writes of a traced program by new values, which are put back through views.

Nearly all of torch's in-place operators have a functional variant, which takes the same arguments
and returns the written value. It is found by comparing schemas, so this file needs no list of
operators. An operator without a functional variant raises CaptureError.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.traced_nodes import tensors_of
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Ref

# Views that keep the order of elements.
_RESHAPES = re.compile(
    r"aten\.(_unsafe_view|view|view_as|reshape|reshape_as|flatten|unflatten|squeeze|unsqueeze)_?\b"
)
_PIECES = re.compile(r"aten\.(unsafe_)?(split|split_with_sizes|chunk|tensor_split|unbind)\b")
_TRANSPOSES = re.compile(r"aten\.(transpose|t|swapaxes|swapdims|mT|numpy_T)_?\b")
# These write into running statistics, which their schemas do not show.
_NORMS = ("aten.batch_norm.default", "aten.native_batch_norm.default")
NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_RUNNING = (3, 4)  # indices of a norm's arguments, and of its twin's results


@dataclass(frozen=True)
class Functional:
    """An operator that returns the values that a traced one writes.

    Attributes:
        target: the operator.
        args, kwargs: its arguments, as traced.
        value: a fake value like its result.
        written: each written tensor with the index of the result that holds its new value.
        returned: for each result of the traced operator, the written tensor or the index of a
            result.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    written: tuple[tuple[fx.Node, int], ...]
    returned: tuple[fx.Node | int, ...]


def is_write(node: fx.Node) -> bool:
    """Returns whether a traced operator changes elements of a tensor.

    Operators that change only shapes and strides (`unsqueeze_`) are views.
    """
    if str(node.target) in _NORMS:
        return node.args[5] is True and all(node.args[at] is not None for at in _RUNNING)
    # Private but old; only the schema says what an operator of another library writes.
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None and schema.is_mutable and torch.Tag.inplace_view not in node.target.tags  # type: ignore[union-attr]
    )


def is_composed(node: fx.Node) -> bool:
    """Returns whether a traced operator is composite and writes through one of its parts."""
    tracks = str(node.target) == "aten.instance_norm.default" and node.args[5] is True
    return tracks and any(node.args[at] is not None for at in _RUNNING)


def functional(node: fx.Node) -> Functional:
    """Returns the functional variant of a traced operator that writes.

    Raises:
        CaptureError: torch has no operator that returns the written value, or the write would
            change the shape of a tensor.
    """
    if str(node.target) in _NORMS:
        return _norm(node)
    target: Any = node.target
    schema = target._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    match = _twin(target)
    if match is None:
        raise CaptureError(
            f"{target} writes into a tensor and has no functional variant",
            why="torch has no operator that returns the written value",
            todo="write it with other operators of torch",
        )
    twin, names = match
    args, kwargs = _arguments(target, twin, names, given)
    written: list[fx.Node] = []
    for argument in filter(_is_written, schema.arguments):
        value = given.get(argument.name)
        items = value if isinstance(value, (list, tuple)) else [value]
        written += [item for item in items if isinstance(item, fx.Node)]
    operands, keywords = fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
    value = twin(*operands, **keywords)
    own = sum(not _is_alias(result) for result in schema.returns)
    results = tensors_of(value)
    if len(results) != own + len(written):
        raise CaptureError(
            f"{target} writes into several lists of tensors",
            todo="write into one tensor, or one list, after another",
        )
    left = tuple(zip(written, range(own, len(results)), strict=True))
    for item, at in left:
        if results[at].shape != item.meta["val"].shape:
            raise CaptureError(
                f"{target} resizes the tensor that it writes into",
                todo="use the operation without out=, or create a new tensor",
            )
    aliases, others = iter(written), iter(range(own))
    returned = tuple(next(aliases) if _is_alias(r) else next(others) for r in schema.returns)
    return Functional(twin, args, kwargs, value, left, returned)


def _norm(node: fx.Node) -> Functional:
    """Returns the twin of a batch norm in training: its result and its running statistics."""
    args = (*node.args[:5], True, *node.args[6:8])
    operands = fx.node.map_arg(args, lambda item: item.meta["val"])
    written = tuple((node.args[at], at) for at in _RUNNING)
    count = len(tensors_of(node.meta["val"]))
    return Functional(NORM, args, {}, NORM(*operands), written, tuple(range(count)))  # type: ignore[arg-type]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_alias(result: Any) -> bool:
    return result.alias_info is not None


def _twin(target: Any) -> tuple[Any, dict[str, str]] | None:
    """Returns the functional variant, and a mapping of its argument names to the operator's."""
    schema = target._schema
    own = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    results = sum(not _is_alias(r) for r in schema.returns)
    results += sum(map(_is_written, schema.arguments))
    for twin in _candidates(target):
        expected = [(a.name, str(a.type)) for a in twin._schema.arguments]
        if twin._schema.is_mutable or len(twin._schema.returns) != results:
            continue
        if sorted(own) == sorted(expected):
            return twin, {name: name for name, _ in own}
        if [kind for _, kind in own] == [kind for _, kind in expected]:
            return twin, {new: old for (old, _), (new, _) in zip(own, expected, strict=True)}
    return None


def _candidates(target: Any) -> Iterator[Any]:
    """Yields possible functional variants: operators of the same name, the same overload first."""
    packet = target.overloadpacket
    name, library = packet.__name__, getattr(torch.ops, target.namespace)
    plain = re.sub(r"^__i(\w+)__$", r"__\1__", name)  # __iand__
    plain = plain if plain != name else name.removesuffix("_")
    for wish in dict.fromkeys((plain, f"{plain}_functional", name, f"{name}_functional")):
        if not hasattr(library, wish):
            continue
        candidate = getattr(library, wish)
        overloads = sorted(candidate.overloads(), key=lambda each: each != target._overloadname)
        yield from (getattr(candidate, overload) for overload in overloads)


def _arguments(
    target: Any, twin: Any, names: dict[str, str], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of the functional variant, with defaults that it does not have."""
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    gap = False
    for argument in twin._schema.arguments:
        name = names[argument.name]
        same = argument.has_default_value() and argument.default_value == defaults.get(name)
        if name not in given and same:
            gap = True
        elif argument.kwarg_only or gap:
            kwargs[argument.name] = given.get(name, defaults.get(name))
        else:
            args.append(given.get(name, defaults.get(name)))
    return tuple(args), kwargs


def loses_gradients(node: fx.Node, call: Functional, flows: Callable[[fx.Node], bool]) -> bool:
    """Returns whether torch's gradients of a write differ from those of its functional variant.

    Args:
        node: the traced operator.
        call: the functional variant; a few have no derivative.
        flows: returns whether a gradient flows through an operand.
    """
    return not _has_gradient(call, flows) or _is_unseen(node, flows)


def _has_gradient(call: Functional, flows: Callable[[fx.Node], bool]) -> bool:

    def flowing(item: fx.Node) -> Any:
        value = item.meta["val"]
        return value.detach().requires_grad_(flows(item)) if isinstance(value, Tensor) else value

    with torch.enable_grad():
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), flowing)
        results = tensors_of(call.target(*args, **kwargs))
    return not any("NotImplemented" in str(result.grad_fn) for result in results)


def _is_unseen(node: fx.Node, flows: Callable[[fx.Node], bool]) -> bool:
    """Returns whether autograd ignores a write, so that the written tensor keeps its gradient."""

    def flowing(item: fx.Node) -> Any:
        value = item.meta["val"]
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(flows(item)).clone()

    target: Any = node.target
    with torch.enable_grad():
        values = {item: flowing(item) for item in node.all_input_nodes}
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        before = [(tensor, tensor.grad_fn, tensor._version) for tensor in tensors]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        target(*args, **kwargs)
    return any(
        tensor.grad_fn is not None and tensor.grad_fn is grad_fn and tensor._version != version
        for tensor, grad_fn, version in before
    )


def is_idle(node: fx.Node | None) -> bool:
    """Returns whether a traced operator returned the very same tensor: a cast to the same dtype."""
    if node is None or not re.match(r"aten\.(to|type_as|contiguous)\b", str(node.target)):
        return False
    before: Any = node.args[0]
    values = before.meta["val"], node.meta["val"]
    return bool(values[0].untyped_storage() == values[1].untyped_storage())


def view_name(node: fx.Node, leaf: str) -> str:
    """Returns the view that is equivalent to a change of shape: `unsqueeze` for `unsqueeze_`.

    Raises:
        CaptureError: the operator is no such view, or the tensor is the `leaf`, which outlives the
            forward.
    """
    twin = _twin(node.target)
    if twin is None or not any(map(_is_alias, twin[0]._schema.returns)):
        raise CaptureError(
            f"{node.target} changes the memory of a tensor",
            todo="create a new tensor, or copy_ into this one",
        )
    name = str(twin[0]).removesuffix(".default")
    if leaf and name != "aten.detach":
        raise CaptureError(
            f"{node.target} changes the shape of {leaf!r}",
            why="it would keep that shape in the next step",
            todo=f"use {name.split('.')[1]}, which returns a view",
        )
    return name


def functional_name(op: str) -> str:
    """Removes the underscore: "aten.unsqueeze_" -> "aten.unsqueeze"."""
    return re.sub(r"_(?=\.|$)", "", op, count=1)


def put_back(view: fx.Node, parent: Tensor, old: Ref, new: Ref) -> tuple[str, tuple[Arg, ...]]:
    """Returns the operator and arguments of a tensor's value after a view of it is overwritten.

    Args:
        view: the traced operator that made the view.
        parent: a fake tensor like the viewed one.
        old, new: the viewed value, and the view's new value.

    Raises:
        CaptureError: a view of this kind cannot be put back.
    """
    op = str(view.target)
    rest: tuple[Any, ...]
    rest = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in view.args[1:])
    sizes = tuple(map(int, parent.shape))
    if op == "aten.slice.Tensor":
        return "aten.slice_scatter", (old, new, *rest)
    if op == "aten.select.int":
        return "aten.select_scatter", (old, new, *rest)
    if op == "aten.narrow.default":
        dim, start, length = rest
        start = start + sizes[dim] if start < 0 else start
        return "aten.slice_scatter", (old, new, dim, start, start + length)
    if op in ("aten.movedim.int", "aten.movedim.intlist"):
        return op, (new, rest[1], rest[0])
    if op == "aten.diagonal.default":
        return "aten.diagonal_scatter", (old, new, *rest)
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
        todo="write through slices, transposes or reshapes, or create a new tensor",
    )


def _put_back_piece(view: fx.Node, old: Ref, new: Ref) -> tuple[str, tuple[Arg, ...]]:
    """Returns the same as `put_back` for a view that is one of the pieces of a split tensor."""
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

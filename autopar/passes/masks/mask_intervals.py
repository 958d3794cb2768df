"""Masks of attention that show each query the keys of one interval, found without the whole mask.

A comparison of query positions with ascending key positions shows each query an interval of keys,
and so does an `and` of comparisons. A mask of a million positions has 2^40 elements; its intervals
are only two million numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autopar.ir.graph import Graph, Ref

Evaluate = Callable[[str], Tensor | None]
Intervals = tuple[Tensor, Tensor]  # first key of each query, and the end

_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
_COMPARISONS = {f"aten.{name}.Tensor": name for name in _MIRRORED}
_DISTANCES = {f"aten.{name}.Scalar": name for name in _MIRRORED}
_ANDS = ("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and")
_VIEWS = ("aten.unsqueeze", "aten.reshape")
_SAME = ("aten.expand", "autopar.share", "autopar.detach")


def kind_by_intervals(graph: Graph, name: str, evaluate: Evaluate) -> str:
    """Returns "full", "causal" or "" for a mask that depends on no input, "" also if unknown.

    Args:
        graph: the graph.
        name: a bool mask [..., queries, keys].
        evaluate: returns the value of a node, None if that is too large.
    """
    shape = graph[name].type.shape
    found = _intervals(graph, name, evaluate) if len(shape) > 1 else None
    if found is None:
        return ""
    (first, end), (queries, keys) = found, shape[-2:]
    if bool((first == 0).all()) and bool((end == keys).all()):
        return "full"
    numbers = torch.arange(1, queries + 1)
    causal = queries == keys and bool((first == 0).all()) and bool((end == numbers).all())
    return "causal" if causal else ""


def seen_at_most(graph: Graph, name: str, evaluate: Evaluate) -> float:
    """Returns the share of keys that a bool mask leaves the average query, or more.

    Parts of an `and` that depend on inputs, such as documents, count as if they hid nothing. A
    value of the batch that is compared with itself by order, as positions are, is assumed to be in
    order for half of all pairs.
    """
    keys = graph[name].type.shape[-1]
    found = _intervals(graph, name, evaluate, open_ended=True)
    share = 1.0
    if found is not None:
        share = float((found[1] - found[0]).clamp(min=0).double().mean()) / keys
    return min(share, (keys + 1) / (2 * keys)) if _orders(graph, name) else share


def _orders(graph: Graph, name: str) -> bool:
    """Returns whether a mask is, or is an `and` with, a comparison of a value with itself."""
    node = graph[name]
    if node.op in (*_SAME, *_VIEWS):
        return _orders(graph, node.inputs[0])
    if node.op in _ANDS:
        return any(_orders(graph, operand) for operand in node.inputs)
    if _COMPARISONS.get(node.op, "eq") == "eq" or len(node.inputs) != 2:
        return False
    shapes = {graph[operand].type.shape[-2:] for operand in node.inputs}
    length = graph[name].type.shape[-1]
    one = len({_viewed(graph, operand) for operand in node.inputs}) == 1
    return one and shapes == {(length, 1), (1, length)}


def _viewed(graph: Graph, name: str) -> str:
    while graph[name].op in (*_SAME, *_VIEWS):
        name = graph[name].inputs[0]
    return name


def _intervals(
    graph: Graph, name: str, evaluate: Evaluate, open_ended: bool = False
) -> Intervals | None:
    """Returns the keys of each query, if they form one interval that is equal for all batches.

    If `open_ended`, parts of an `and` that are unknown hide nothing.
    """
    node = graph[name]
    queries, keys = node.type.shape[-2:]
    views = (*_SAME, *_VIEWS) if open_ended else _SAME
    if node.op in views and graph[node.inputs[0]].type.shape[-2:] == (queries, keys):
        return _intervals(graph, node.inputs[0], evaluate, open_ended)
    if node.op in _ANDS:
        size, two = (queries, keys), _two(node.args)
        parts = [_operand(graph, name, size, evaluate, open_ended) for name in two]
        if open_ended:
            parts = [_everything(size) if part is None else part for part in parts]
        if len(parts) != 2 or None in parts:
            return None
        (low, end), (other, before) = (part for part in parts if part is not None)
        return torch.maximum(low, other), torch.minimum(end, before)
    distance = _DISTANCES.get(node.op)
    source = graph[node.inputs[0]] if distance else node
    if (not distance and node.op not in _COMPARISONS) or len(_two(source.args)) != 2:
        return None
    left, right = (_line(evaluate(operand)) for operand in _two(source.args))
    if left is None or right is None:
        return None
    comparison = distance or _COMPARISONS[node.op]
    if distance:  # left - right is compared with a number
        if source.op != "aten.sub.Tensor" or source.kwargs or not isinstance(node.args[1], int):
            return None
        right = right + node.args[1]
    if _along(left) == -1:  # keys are compared with queries
        left, right, comparison = right, left, _MIRRORED[comparison]
    return _seen(left, right, comparison, (queries, keys))


def _operand(
    graph: Graph, name: str, size: tuple[int, int], evaluate: Evaluate, open_ended: bool
) -> Intervals | None:
    """Returns the intervals of an operand of `and`, which may be true everywhere."""
    shape = graph[name].type.shape
    if shape[-2:] == size:
        found = _intervals(graph, name, evaluate, open_ended)
        if found is not None:
            return found
    value = _unrepeated(evaluate(name))
    if value is None or value.numel() != 1 or not bool(value.all()):
        return None
    return _everything(size)


def _everything(size: tuple[int, int]) -> Intervals:
    return torch.zeros(size[0], dtype=torch.int64), torch.full((size[0],), size[1])


def _seen(
    rows: Tensor, columns: Tensor, comparison: str, size: tuple[int, int]
) -> Intervals | None:
    """Returns where `rows comparison columns` holds; None unless columns ascend."""
    if _along(rows) == -1 or _along(columns) == -2:
        return None
    own, keys = (x.flatten().expand(n) for x, n in zip((rows, columns), size, strict=True))
    if not bool((keys[1:] >= keys[:-1]).all()):
        return None
    keys, own = keys.contiguous(), own.contiguous()
    low = torch.searchsorted(keys, own)
    high = torch.searchsorted(keys, own, right=True)
    none, every = torch.zeros_like(low), torch.full_like(low, size[1])
    return {
        "ge": (none, high), "gt": (none, low), "le": (low, every), "lt": (high, every),
        "eq": (low, high),
    }[comparison]  # fmt: skip


def _two(args: tuple[object, ...]) -> list[str]:
    return [arg.name for arg in args if isinstance(arg, Ref)]


def _line(value: Tensor | None) -> Tensor | None:
    """Returns numbers along one of the last two dimensions; None for other values."""
    value = _unrepeated(value)
    if value is None or value.dtype.is_floating_point or value.dtype == torch.bool:
        return None
    long = [dim - value.dim() for dim, size in enumerate(value.shape) if size > 1]
    return value if long in ([], [-1], [-2]) else None


def _along(value: Tensor) -> int:
    """Returns the dimension of numbers along one; 0 for a single number."""
    long = [dim - value.dim() for dim, size in enumerate(value.shape) if size > 1]
    return long[0] if long else 0


def _unrepeated(value: Tensor | None) -> Tensor | None:
    """Returns a value with one element along each dimension whose elements are all equal."""
    for dim in range(value.dim() if value is not None else 0):
        assert value is not None
        first = value.narrow(dim, 0, min(value.shape[dim], 1))
        if value.shape[dim] > 1 and (value.stride(dim) == 0 or bool((value == first).all())):
            value = first
    return value

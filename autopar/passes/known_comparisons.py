"""A pass that removes comparisons of indices whose answer is known, and the masks made of them.

Indices that topk, sort or argmax return lie between 0 and the size of a dimension. Models compare
them with bounds all the same: transformers' experts mask rows of an expert that does not exist.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, argument, dimension, rewrite

Range = tuple[int, int]
# Operators whose result at the given place holds indices along a dimension: the place of the
# dimension's argument.
_INDICES = {
    ("aten.topk", 1): 2, ("aten.sort", 1): 1, ("aten.sort.stable", 1): 2,
    ("aten.max.dim", 1): 1, ("aten.min.dim", 1): 1,
    ("aten.argsort", 0): 1, ("aten.argmax", 0): 1, ("aten.argmin", 0): 1,
}  # fmt: skip
# Operators whose first result has no values but those of the first operand.
_MOVES = {
    "aten.topk", "aten.sort", "aten.sort.stable", "aten.reshape", "aten.expand", "aten.permute",
    "aten.transpose.int", "aten.slice.Tensor", "aten.select.int", "aten.unsqueeze",
    "aten.squeeze.dim", "aten.index.Tensor", "aten.index_select", "aten.gather", "aten.clone",
    "autopar.share", "autopar.detach", "aten.detach",
}  # fmt: skip
_EXACT = {"i32", "i64", "f64"}  # hold every index of a tensor's dimension
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    f"aten.{name}.Scalar": getattr(operator, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")
}


def drop_known_comparisons(graph: Graph) -> Graph:
    """Returns `graph` without masks that are the same everywhere, and without idle clamps."""
    ranges: dict[str, Range] = {}
    known: dict[str, bool] = {}

    def drop(node: Node, editor: Editor) -> Ref | None:
        first = node.args[0] if node.args else None
        if not isinstance(first, Ref):
            return None
        same = _replacement(node, first, ranges, known)
        if same is not None and editor[same.name].types == node.types:
            return same
        if (found := _range(node, first, editor, ranges)) is not None:
            ranges[node.name] = found
        if (answer := _answer(node, first, ranges, known)) is not None:
            known[node.name] = answer
        return None

    return rewrite(graph, drop)


def _range(node: Node, first: Ref, editor: Editor, ranges: dict[str, Range]) -> Range | None:
    """Returns the least and the largest value that a node's result may have."""
    place = node.args[1] if node.op == "getitem" else 0
    source = editor[first.name] if node.op == "getitem" else node
    operand = source.args[0]
    if not isinstance(operand, Ref):
        return None
    if (source.op, place) in _INDICES:
        sizes = editor[operand.name].type.shape
        of_all = source.op in ("aten.argmax", "aten.argmin")  # unless they are told a dimension
        dim = argument(source, _INDICES[source.op, int(str(place))], "dim", None if of_all else -1)
        if dim is None or not sizes:
            return None
        return 0, sizes[dimension(dim, len(sizes), -1)] - 1
    if source.op in _MOVES and place == 0 and (source is not node or len(node.types) == 1):
        return ranges.get(operand.name)
    if node.op == "aten.to.dtype" and node.type.dtype in _EXACT:
        return ranges.get(operand.name)
    return None


def _answer(
    node: Node, first: Ref, ranges: dict[str, Range], known: dict[str, bool]
) -> bool | None:
    """Returns what a mask is everywhere, None if it is not known."""
    if node.op in _COMPARISONS and first.name in ranges:
        low, high = ranges[first.name]
        bound = node.args[1]
        if isinstance(bound, (int, float)):
            return _everywhere(node.op, low, high, bound)
    if node.op in _MOVES or node.op == "aten.to.dtype":
        return known.get(first.name)
    if node.op in ("aten.logical_not", "aten.bitwise_not") and first.name in known:
        return not known[first.name]
    return None


def _everywhere(op: str, low: int, high: int, bound: float) -> bool | None:
    if op in ("aten.eq.Scalar", "aten.ne.Scalar"):
        inside = low <= bound <= high
        return None if inside else op == "aten.ne.Scalar"
    answers = {_COMPARISONS[op](value, bound) for value in (low, high)}  # monotonic in between
    return answers.pop() if len(answers) == 1 else None


def _replacement(
    node: Node, first: Ref, ranges: dict[str, Range], known: dict[str, bool]
) -> Ref | None:
    """Returns the operand that a node's result equals, if it is known."""
    if node.op.startswith("aten.masked_fill."):
        mask = node.args[1]
        idle = isinstance(mask, Ref) and known.get(mask.name) is False
        return first if idle else None
    if node.op == "aten.where.self" and first.name in known:
        chosen = node.args[1 if known[first.name] else 2]
        return chosen if isinstance(chosen, Ref) else None
    if node.op in ("aten.clamp", "aten.clip") and first.name in ranges:
        low, high = ranges[first.name]
        least, most = (argument(node, place, name) for place, name in ((1, "min"), (2, "max")))
        return first if _below(least, low) and _above(most, high) else None
    return None


def _below(bound: Arg, value: int) -> bool:
    return bound is None or (isinstance(bound, (int, float)) and bound <= value)


def _above(bound: Arg, value: int) -> bool:
    return bound is None or (isinstance(bound, (int, float)) and bound >= value)

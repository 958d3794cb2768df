"""A pass that rewrites bags of equal size as look-ups and sums, which can be split."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.rewrite import Editor, argument, number, rewrite
from autopar.ir.tensor import TensorType

_SUM, _MEAN, _MAX = 0, 1, 2  # at::native::EmbeddingBagMode


def lower_bags(graph: Graph) -> Graph:
    """Returns `graph` with each embedding_bag as an embedding and a sum, mean or maximum.

    All bags must have one size (their offsets count up evenly) and no index may be padding. Bags of
    one index are plain look-ups.
    """

    def lower(node: Node, editor: Editor) -> Node | Ref | None:
        if node.op != "getitem" or node.args[1] != 0:
            return None
        bag = editor[node.inputs[0]]
        if bag.op not in ("aten.embedding_bag", "aten.embedding_bag.padding_idx"):
            return None
        return _lowered(node, bag, editor)

    return rewrite(graph, lower)


def _lowered(node: Node, bag: Node, editor: Editor) -> Node | None:
    mode, padding = number(argument(bag, 4, "mode"), _SUM), argument(bag, 8, "padding_idx")
    weights = argument(bag, 6, "per_sample_weights")
    length = _bag_length(bag, editor)
    table, indices = (editor[name] for name in bag.inputs[:2])
    padded = isinstance(padding, int) and padding >= 0
    if not length or padded or argument(bag, 5, "sparse") is True or len(indices.type.shape) != 1:
        return None
    count, width = indices.type.numel // length, table.type.shape[1]
    kind, bags = table.type, (count, length)
    grid = TensorType(indices.type.dtype, bags)
    row_type = TensorType(kind.dtype, (*bags, width))
    at = editor.new("bags", "aten.reshape", (Ref(indices.name), bags), grid, bag)
    rest = (-1, True) if argument(bag, 3, "scale_grad_by_freq") is True else ()
    rows = editor.new("rows", "aten.embedding", (Ref(table.name), at, *rest), row_type, bag)
    if isinstance(weights, Ref):
        each = TensorType(kind.dtype, (*bags, 1))
        scale = editor.new("scale", "aten.reshape", (weights, each.shape), each, bag)
        rows = editor.new("rows", "aten.mul.Tensor", (rows, scale), row_type, bag)
    if mode == _MAX:
        types = (node.type, TensorType("i64", node.type.shape))
        largest = replace(
            bag,
            name=editor.fresh("largest"),
            op="aten.max.dim",
            args=(rows, 1),
            kwargs=(),
            types=types,
        )
        editor.put(largest)
        return replace(node, args=(Ref(largest.name), 0))
    total = replace(node, op="aten.sum.dim_IntList", args=(rows, (1,)), kwargs=())
    if mode == _SUM:
        return total
    summed = replace(total, name=editor.fresh("total"))
    editor.put(summed)
    return replace(node, op="aten.div.Tensor", args=(Ref(summed.name), length), kwargs=())


def _bag_length(bag: Node, editor: Editor) -> int:
    """Returns the size of all bags, or 0 if they differ or it is unknown."""
    offsets, indices = (editor[bag.inputs[i]] for i in (2, 1))
    if offsets.op != "aten.arange.start_step" or argument(bag, 7, "include_last_offset") is True:
        return 0
    start, stop, step = (number(argument(offsets, i, ""), 0) for i in range(3))
    whole = start == 0 < step and stop == indices.type.numel and stop % step == 0
    return step if whole else 0

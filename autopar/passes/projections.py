"""A pass that splits fused projections, so that each part can be sharded separately.

Queries, keys and values often come from one linear whose result is cut in three. Split over a mesh
axis, shards of that result would not align with the three parts; three linears on pieces of the
weight do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, number, rewrite
from autopar.ir.tensor import TensorType

# More pieces than this are a loop over heads or steps, not parallel projections.
_MOST_PIECES = 8


@dataclass(frozen=True)
class _Cut:
    """A slice or select of a linear's result, perhaps through views.

    Attributes:
        node: the slice or select.
        views: views between the linear's result and the cut.
        dims: for the linear's result and each view, the dimension that is cut.
        start, length: position of the cut in the linear's last dimension.
        width: size of that dimension.
    """

    node: str
    views: tuple[Node, ...]
    dims: tuple[int, ...]
    start: int
    length: int
    width: int


@dataclass(frozen=True)
class _Fused:
    """A linear whose result is only read piece by piece.

    Attributes:
        linear, weight, bias: names of the nodes, the last two parameters.
        dim: the dimension of the weight that becomes the linear's last one.
        pieces: (start, length), covering that dimension in order.
        cuts: readers of the pieces.
    """

    linear: str
    weight: str
    bias: str | None
    dim: int
    pieces: tuple[tuple[int, int], ...]
    cuts: tuple[_Cut, ...]


def split_fused(graph: Graph) -> Graph:
    """Returns `graph` with each fused projection as one linear per piece of its parameters.

    A linear is fused if its only readers, perhaps through views, are slices and selects that
    together cover its last dimension without overlap. Its weight and bias must be whole parameters
    that nothing else reads.
    """
    found = [f for node in graph.nodes if node.op == "aten.linear" and (f := _fused(node, graph))]
    linears = {fused.linear: fused for fused in found}
    cuts = {cut.node: (fused.linear, cut) for fused in found for cut in fused.cuts}
    leaves = {fused.weight: (fused, fused.dim) for fused in found}
    leaves |= {fused.bias: (fused, 0) for fused in found if fused.bias is not None}
    parts: dict[tuple[str, int], str] = {}  # (parameter or linear, start) -> its piece

    def split(node: Node, editor: Editor) -> Node | Ref | None:
        if node.name in leaves:
            fused, dim = leaves[node.name]
            for index, (start, length) in enumerate(fused.pieces):
                name = editor.fresh(f"{node.name}_{index}")
                kwargs = (("dim", dim), ("start", start), ("length", length))
                kind = _resized(node.type, dim, length)
                editor.put(replace(node, name=name, kwargs=kwargs, types=(kind,)))
                parts[node.name, start] = name
        elif node.name in linears:
            fused = linears[node.name]
            for start, length in fused.pieces:
                weight = Ref(parts[fused.weight, start])
                if fused.dim == 1:
                    kind = editor[weight.name].type
                    kind = TensorType(kind.dtype, kind.shape[::-1])
                    hint = f"{weight.name}_t"
                    weight = editor.new(hint, "aten.transpose.int", (weight, 0, 1), kind, node)
                args: tuple[Arg, ...] = (node.args[0], weight)
                if fused.bias is not None:
                    args = (*args, Ref(parts[fused.bias, start]))
                kind = _resized(node.type, len(node.type.shape) - 1, length)
                parts[node.name, start] = editor.new("linear", node.op, args, kind, node).name
        elif node.name in cuts:
            linear, cut = cuts[node.name]
            return _viewed(parts[linear, cut.start], cut, node, editor)
        else:
            return None
        return Ref(parts[node.name, 0])

    return rewrite(graph, split)


def _resized(kind: TensorType, dim: int, size: int) -> TensorType:
    return TensorType(kind.dtype, (*kind.shape[:dim], size, *kind.shape[dim + 1 :]))


def _fused(node: Node, graph: Graph) -> _Fused | None:
    """Returns the fused projection of a node, None if it is not one."""
    cuts = _cuts(node, graph)
    pieces = sorted({(cut.start, cut.length) for cut in cuts or ()})
    ends = [0, *(start + length for start, length in pieces)]
    if not 2 <= len(pieces) <= _MOST_PIECES or ends[-1] != node.type.shape[-1]:
        return None
    if cuts is None or [start for start, _ in pieces] != ends[:-1]:
        return None
    weight, dim, owned = graph[node.inputs[1]], 0, [node.name]
    if weight.op == "aten.transpose.int" and len(weight.type.shape) == 2:
        if graph.users[weight.name] != (node.name,):
            return None
        owned.append(weight.name)
        weight, dim = graph[weight.inputs[0]], 1
    bias = graph[node.inputs[2]] if len(node.inputs) == 3 else None
    results = {name for _, name in graph.outputs}
    for leaf in (weight, bias):
        if leaf is None:
            continue
        whole = leaf.op == "param" and not leaf.kwargs and leaf.name not in results
        if not whole or not set(graph.users[leaf.name]) <= set(owned):
            return None
    bias_name = None if bias is None else bias.name
    return _Fused(node.name, weight.name, bias_name, dim, tuple(pieces), tuple(cuts))


def _cuts(linear: Node, graph: Graph) -> list[_Cut] | None:
    """Returns all cuts of a linear's last dimension; None if it is read in any other way."""
    results = {name for _, name in graph.outputs}
    cuts: list[_Cut] = []
    paths: list[tuple[Node, ...]] = [(linear,)]
    while paths:
        path = paths.pop()
        if path[-1].name in results:
            return None
        for user in graph.users[path[-1].name]:
            node = graph[user]
            if node.op in ("aten.reshape", "aten.transpose.int", "aten.permute", "aten.unsqueeze"):
                paths.append((*path, node))
                continue
            cut = _cut(node, path)
            if cut is None:
                return None
            cuts.append(cut)
    return cuts


def _cut(node: Node, path: tuple[Node, ...]) -> _Cut | None:
    """Returns `node` as a cut of the first value of `path`, seen through the other values."""
    if node.op == "aten.slice.Tensor" and len(node.args) == 4:
        start, end = number(node.args[2], 0), number(node.args[3], 0)
    elif node.op == "aten.select.int":
        start = number(node.args[2], 0)
        end = start + 1
    else:
        return None
    dim, dims = number(node.args[1], 0), []
    for view, source in zip(path[:0:-1], path[-2::-1], strict=True):
        dims.append(dim)
        before = _dim_before(view, source.type.shape, dim)
        if before is None:
            return None
        factor = source.type.shape[before] // view.type.shape[dim]
        dim, start, end = before, start * factor, end * factor
    dims.append(dim)
    if start < 0 or dim != len(path[0].type.shape) - 1:
        return None
    return _Cut(node.name, path[1:], tuple(dims[::-1]), start, end - start, path[0].type.shape[-1])


def _dim_before(view: Node, shape: tuple[int, ...], dim: int) -> int | None:
    """Returns the operand's dimension, of `shape`, whose outermost factor is the view's `dim`."""
    if view.op == "aten.transpose.int":
        swap = dict(zip(view.args[1:], view.args[:0:-1], strict=True))
        return number(swap.get(dim, dim), dim)
    if view.op == "aten.permute":
        order = view.args[1]
        assert isinstance(order, tuple)
        return number(order[dim], dim)
    if view.op == "aten.unsqueeze":
        at = number(view.args[1], 0) % len(view.type.shape)
        return None if dim == at else dim - (dim > at)
    sizes = view.type.shape
    before = math.prod(sizes[:dim])
    for index, size in enumerate(shape):
        if size > 1 and math.prod(shape[:index]) == before:
            inner = (math.prod(sizes[dim:end]) for end in range(dim + 1, len(sizes) + 1))
            return index if size in inner else None
    return None


def _viewed(piece: str, cut: _Cut, node: Node, editor: Editor) -> Ref:
    """Applies the views of a cut to its piece of the linear, merging adjacent reshapes."""
    value, kind = Ref(piece), editor[piece].type
    for view, dim in zip(cut.views, cut.dims[1:], strict=True):
        whole = view.type.shape[dim]
        size = whole * cut.length // cut.width
        kind = _resized(view.type, dim, size)
        if view.op in ("aten.reshape", "aten.unsqueeze") or _moves_ones(view, editor[value.name]):
            value = _reshaped(value, kind, view, editor)
        else:
            value = editor.new(view.name, view.op, (value, *view.args[1:]), kind, view)
    return _reshaped(value, node.type, node, editor)


def _moves_ones(view: Node, source: Node) -> bool:
    """Returns whether a transpose or permute of `source` moves only dimensions of size one."""
    rank = len(source.type.shape)
    order = list(range(rank))
    if view.op == "aten.permute":
        order = [number(dim, 0) for dim in view.args[1]]  # type: ignore[union-attr]
    else:
        a, b = number(view.args[1], 0), number(view.args[2], 0)
        order[a], order[b] = b, a
    moved = [dim for dim in order if source.type.shape[dim] > 1]
    return moved == sorted(moved)


def _reshaped(value: Ref, kind: TensorType, like: Node, editor: Editor) -> Ref:
    source = editor[value.name]
    while source.type != kind and source.op == "aten.reshape":
        source = editor[source.inputs[0]]
    if source.type == kind:
        return Ref(source.name)
    return editor.new(like.name, "aten.reshape", (Ref(source.name), kind.shape), kind, like)

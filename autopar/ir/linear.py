"""Passes on products with weights: one spelling, and fused projections taken apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, number, rewrite
from autopar.ir.tensor import TensorType


def lower_linears(graph: Graph) -> Graph:
    """`graph` with products by a parameter as `aten.linear(x, weight, bias)`.

    `addmm`, `mm` and `matmul` with a two-dimensional parameter on the right become a linear of its
    transpose; the reshapes around one that only fold the batch dimensions go. `x @ w.T` reads w.
    """
    results = {name for _, name in graph.outputs}

    def lower(node: Node, editor: Editor) -> Node | Ref | None:
        if node.op == "aten.reshape" and editor[node.inputs[0]].types == node.types:
            return Ref(node.inputs[0])
        operands = _product(node, editor)
        weight = operands and _transposed(operands[1], editor)
        if operands is None or weight is None:
            return None
        x, w, bias = operands
        folded, width = editor[x], editor[w].type.shape[1]
        source = editor[folded.inputs[0]] if folded.op == "aten.reshape" else folded
        shape = (*source.type.shape[:-1], width)
        if (
            source.type.shape[-1:] != folded.type.shape[-1:]
            or node.name in results
            or any(
                graph[user].op != "aten.reshape" or graph[user].type.shape != shape
                for user in graph.users[node.name]
            )
        ):
            source, shape = folded, node.type.shape
        if isinstance(weight, Node):
            kind = TensorType(weight.type.dtype, weight.type.shape[::-1])
            transpose = (Ref(weight.name), 0, 1)
            weight = editor.new(f"{weight.name}_t", "aten.transpose.int", transpose, kind, node)
        args: tuple[Arg, ...] = (Ref(source.name), weight)
        args = args if bias is None else (*args, Ref(bias))
        return editor.new("linear", "aten.linear", args, TensorType(node.type.dtype, shape), node)

    return rewrite(graph, lower)


def _product(node: Node, editor: Editor) -> tuple[str, str, str | None] | None:
    """The names of (x, w, bias) of a product x @ w + bias with a matrix w."""
    if node.op in ("aten.mm", "aten.matmul"):
        x, w = node.inputs
        return (x, w, None) if len(editor[w].type.shape) == 2 else None
    if node.op == "aten.addmm" and not node.kwargs and len(node.inputs) == 3:
        bias, x, w = node.inputs
        fits = editor[bias].type.shape == node.type.shape[1:]
        return (x, w, bias) if fits else None
    return None


def _transposed(name: str, editor: Editor) -> Node | Ref | None:
    """A parameter that is to be transposed, or the one whose transpose `name` is."""
    node = editor[name]
    if node.op == "param":
        return node
    swaps = node.op == "aten.transpose.int" or (
        node.op == "aten.permute" and node.args[1] == (1, 0)
    )
    if swaps and editor[node.inputs[0]].op == "param":
        return Ref(node.inputs[0])
    return None


@dataclass(frozen=True)
class _Fused:
    """A linear whose result is only read piece by piece.

    Attributes:
        linear, weight, bias: names of the nodes, the last two parameters.
        dim: the dimension of the weight that the linear's last one comes from.
        pieces: (start, length), covering that dimension in order.
    """

    linear: str
    weight: str
    bias: str | None
    dim: int
    pieces: tuple[tuple[int, int], ...]


def split_fused(graph: Graph) -> Graph:
    """`graph` with each fused projection as one linear a piece, on pieces of its parameters.

    A linear is fused if slices along its last dimension, which together cover it without overlap,
    are its only readers. Its weight and bias must be whole parameters that nobody else reads.
    """
    found = [f for node in graph.nodes if node.op == "aten.linear" and (f := _fused(node, graph))]
    linears = {fused.linear: fused for fused in found}
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
        elif node.op == "aten.slice.Tensor" and graph[node.name].inputs[0] in linears:
            return Ref(parts[graph[node.name].inputs[0], number(node.args[2], 0)])
        else:
            return None
        return Ref(parts[node.name, 0])

    return rewrite(graph, split)


def _resized(kind: TensorType, dim: int, size: int) -> TensorType:
    return TensorType(kind.dtype, (*kind.shape[:dim], size, *kind.shape[dim + 1 :]))


def _fused(node: Node, graph: Graph) -> _Fused | None:
    """What there is to split, if anything."""
    weight, dim = graph[node.inputs[1]], 0
    readers = [graph[user] for user in graph.users[node.name]]
    results = {name for _, name in graph.outputs}
    last = len(node.type.shape) - 1
    if node.name in results or any(
        reader.op != "aten.slice.Tensor" or reader.args[1] != last for reader in readers
    ):
        return None
    pieces = sorted({(number(r.args[2], 0), r.type.shape[last]) for r in readers})
    ends = [0, *(start + length for start, length in pieces)]
    if len(pieces) < 2 or [start for start, _ in pieces] != ends[:-1]:
        return None
    if ends[-1] != node.type.shape[last]:
        return None
    owned = [node.name]
    if weight.op == "aten.transpose.int" and len(weight.type.shape) == 2:
        owned.append(weight.name)
        weight, dim = graph[weight.inputs[0]], 1
    bias = graph[node.inputs[2]] if len(node.inputs) == 3 else None
    for leaf in (weight, bias):
        if leaf is None:
            continue
        whole = leaf.op == "param" and not leaf.kwargs and leaf.name not in results
        if not whole or not set(graph.users[leaf.name]) <= set(owned):
            return None
    if dim == 1 and graph.users[owned[1]] != (node.name,):
        return None
    return _Fused(node.name, weight.name, None if bias is None else bias.name, dim, tuple(pieces))

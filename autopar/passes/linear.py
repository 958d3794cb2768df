"""A pass that writes all products with weights as linears."""

from __future__ import annotations

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, rewrite
from autopar.ir.tensor import TensorType


def lower_linears(graph: Graph) -> Graph:
    """Returns `graph` with products by a parameter as `aten.linear(x, weight, bias)`.

    `addmm`, `mm` and `matmul` with a two-dimensional parameter on the right become a linear of its
    transpose, or of w for `x @ w.T`; reshapes around it that only fold batch dimensions are
    dropped.
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
    """Returns the names of (x, w, bias) of a product x @ w + bias with a matrix w."""
    if node.op in ("aten.mm", "aten.matmul"):
        x, w = node.inputs
        return (x, w, None) if len(editor[w].type.shape) == 2 else None
    if node.op == "aten.addmm" and not node.kwargs and len(node.inputs) == 3:
        bias, x, w = node.inputs
        fits = editor[bias].type.shape == node.type.shape[1:]
        return (x, w, bias) if fits else None
    return None


def _transposed(name: str, editor: Editor) -> Node | Ref | None:
    """Returns the transpose of a parameter, or the parameter of which `name` is the transpose."""
    node = editor[name]
    if node.op == "param":
        return node
    swaps = node.op == "aten.transpose.int" or (
        node.op == "aten.permute" and node.args[1] == (1, 0)
    )
    if swaps and editor[node.inputs[0]].op == "param":
        return Ref(node.inputs[0])
    return None

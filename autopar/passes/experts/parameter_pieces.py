"""Parameters that hold two weights, one behind the other, as two pieces."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.rewrite import Editor
from autopar.ir.tensor import TensorType


def halves_of(node: Node, dim: int, editor: Editor) -> tuple[Ref, Ref]:
    """Returns a parameter as two pieces along a dimension."""
    shape, inner = node.type.shape, node.type.shape[dim] // 2
    kind = TensorType(node.type.dtype, (*shape[:dim], inner, *shape[dim + 1 :]))
    refs = []
    for index, start in enumerate((0, inner)):
        name = editor.fresh(f"{node.name}_{index}")
        kwargs = (("dim", dim), ("start", start), ("length", inner))
        editor.put(replace(node, name=name, kwargs=kwargs, types=(kind,)))
        refs.append(Ref(name))
    return refs[0], refs[1]


def is_whole(node: Node, graph: Graph) -> bool:
    """Returns whether a value is a whole parameter that is read once."""
    results = {name for _, name in graph.outputs}
    whole = node.op == "param" and not node.kwargs
    return whole and node.name not in results and len(graph.users[node.name]) == 1

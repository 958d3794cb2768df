"""A pass that sends a token once to all of its experts, where a model repeats it for each.

    %rows = repeat_interleave(%x, 2, 0)
    %each = autopar.mixture(..., %rows, %flat_ids, 1, ...)
    %y = sum(reshape(%each, (tokens, 2, width)) * %weights[..., None], 1)

is one mixture of %x, its ids and its weights (DeepSeek's models write it so).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.rewrite import Editor, rewrite
from autopar.ir.tensor import TensorType
from autopar.operators.mixture import MIXTURE, by_name
from autopar.passes.experts.expert_sums import bare

_X = 3  # the place of the tokens among the arguments, before ids and weights


def join_repeated(graph: Graph) -> Graph:
    """Returns `graph` with each such sum as one mixture."""

    def write(node: Node, editor: Editor) -> Node | Ref | None:
        operands = _operands(node, graph) if node.op == "aten.sum.dim_IntList" else None
        return None if operands is None else _joined(node, *operands, editor)

    return rewrite(graph, write)


def _operands(node: Node, graph: Graph) -> tuple[Node, str, str, str] | None:
    """Returns the mixture, its tokens, and their ids and weights, of which a value is the sum."""
    product = graph[node.inputs[0]]
    shape = product.type.shape
    last = (len(shape) - 2, -2)
    summed = len(node.args) == 2 and node.args[1] in [(dim,) for dim in last]
    if not summed or node.kwargs or product.op != "aten.mul.Tensor" or len(product.inputs) != 2:
        return None
    for each, weights in (product.inputs, product.inputs[::-1]):
        mixture = graph[bare(each, graph)]
        scale = graph[weights].type.shape == (*shape[:-1], 1)
        if mixture.op != MIXTURE or graph[each].type.shape != shape or not scale:
            continue
        named = by_name(mixture, mixture.inputs)
        ones = graph[named["weights"]].op == "aten.ones"
        x = _repeated(named["x"], shape[-2], graph)
        if ones and x and graph[named["ids"]].type.shape[-1] == 1:
            return mixture, x, named["ids"], weights
    return None


def _repeated(rows: str, times: int, graph: Graph) -> str:
    """Returns the value whose rows `rows` repeats `times` times each; "" if there is none."""
    node = graph[bare(rows, graph)]
    if node.op == "aten.repeat_interleave.self_int" and node.args[1:] == (times, 0):
        return node.inputs[0] if len(graph[node.inputs[0]].type.shape) == 2 else ""
    source = graph[node.inputs[0]] if node.op == "aten.expand" else node
    if node.op != "aten.expand" or len(node.type.shape) != 3:
        return ""
    tokens, count, width = node.type.shape
    fits = count == times and source.type.shape == (tokens, 1, width)
    return source.name if fits else ""


def _joined(
    node: Node, mixture: Node, x: str, ids: str, weights: str, editor: Editor
) -> Node | Ref:
    slots = editor[editor.resolve(weights)].type.shape[-2]
    tokens = editor[editor.resolve(ids)].type.numel // slots

    def viewed(name: str, shape: tuple[int, ...]) -> Ref:
        name = editor.resolve(name)
        kind = editor[name].type
        if kind.shape == shape:
            return Ref(name)
        return editor.new(
            f"{name}_each", "aten.reshape", (Ref(name), shape), TensorType(kind.dtype, shape), node
        )

    width = node.type.shape[-1]
    args = list(mixture.map_refs(lambda name: Ref(editor.resolve(name))).args)
    args[_X : _X + 3] = [
        viewed(x, (tokens, width)),
        viewed(ids, (tokens, slots)),
        viewed(weights, (tokens, slots)),
    ]
    joined = replace(mixture, name=editor.fresh(mixture.name), args=tuple(args), source=node.source)
    joined = replace(joined, types=(TensorType(mixture.type.dtype, (tokens, width)),))
    editor.put(joined)
    return viewed(joined.name, node.type.shape)

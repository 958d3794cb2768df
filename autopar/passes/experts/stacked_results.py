"""A pass that adds results of experts one by one, where a model stacks them and sums the stack.

    %all = stack((%y0, %y1, %y2), 1)
    %y = sum(%scores[..., None] * %all, 1)           # or einsum('te,ted->td', (%scores, %all))

The sum is found as one of experts (see `looped_experts.py`) only if it is written out.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.rewrite import Editor, dimension, rewrite
from autopar.ir.tensor import TensorType
from autopar.passes.experts.chosen_elements import EXPERT, ChosenElements


@dataclass(frozen=True)
class _Stack:
    """Results of experts, their scores, and the dimension of scores that numbers the experts."""

    results: tuple[str, ...]
    scores: str
    dim: int


def add_stacked(graph: Graph) -> Graph:
    """Returns `graph` with sums of stacks, times scores that are zero for most, written out."""
    if not any(node.op == "aten.stack" for node in graph.nodes):
        return graph
    chosen = ChosenElements(graph)

    def write(node: Node, editor: Editor) -> Node | Ref | None:
        if node.op == "aten.sum.dim_IntList":
            found = _summed(graph[node.name], chosen)
        elif node.op == "aten.einsum":
            found = _contracted(graph[node.name], chosen)
        else:
            return None
        return None if found is None else _written(found, node, editor)

    return rewrite(graph, write)


def _summed(node: Node, chosen: ChosenElements) -> _Stack | None:
    """Returns the stack of which the sum of a product is."""
    graph = chosen.graph
    product = graph[node.inputs[0]]
    dims = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    if product.op != "aten.mul.Tensor" or len(product.inputs) != 2 or not isinstance(dims, tuple):
        return None
    shape = product.type.shape
    for name, scores in (product.inputs, product.inputs[::-1]):
        stack, wanted = _stacked(graph[name]), (*shape[:-1], 1)
        if stack is None or graph[scores].type.shape != wanted or len(dims) != 1:
            continue
        at = dimension(dims[0], len(shape))
        found = chosen.of(scores)
        if at == stack[1] and found is not None and found.dims[at] == EXPERT:
            return _Stack(stack[0], scores, at)
    return None


def _contracted(node: Node, chosen: ChosenElements) -> _Stack | None:
    """Returns the stack that an einsum of two operands contracts with scores."""
    graph = chosen.graph
    text, operands = node.args[:2]
    if not isinstance(text, str) or not isinstance(operands, tuple) or len(node.inputs) != 2:
        return None
    into, _, out = text.replace(" ", "").partition("->")
    terms = into.split(",")
    for own, other in ((0, 1), (1, 0)) if len(terms) == 2 else ():
        stack, scores = _stacked(graph[node.inputs[own]]), node.inputs[other]
        if stack is None or "." in text or len(terms[own]) <= stack[1]:
            continue
        letter = terms[own][stack[1]]
        fits = terms[own].replace(letter, "") == out and terms[other] == out[:-1] + letter
        found = chosen.of(scores)
        if fits and found is not None and found.dims[-1] == EXPERT:
            return _Stack(stack[0], scores, len(found.dims) - 1)
    return None


def _stacked(node: Node) -> tuple[tuple[str, ...], int] | None:
    """Returns the values of a stack, and the dimension of its result along which they are."""
    if node.op != "aten.stack":
        return None
    at = dimension(node.args[1] if len(node.args) > 1 else 0, len(node.type.shape))
    return (node.inputs, at) if at < len(node.type.shape) - 1 else None


def _written(of: _Stack, node: Node, editor: Editor) -> Ref:
    """Returns the sum of the results, each times its scores."""
    scores = editor[editor.resolve(of.scores)]
    kind = node.type
    total: Ref | None = None
    for number, name in enumerate(of.results):
        shape = (*scores.type.shape[: of.dim], *scores.type.shape[of.dim + 1 :])
        args = (Ref(scores.name), of.dim, number)
        score = editor.new(
            "score", "aten.select.int", args, TensorType(scores.type.dtype, shape), node
        )
        column = (*kind.shape[:-1], 1)
        if shape != column:
            kind_of = TensorType(scores.type.dtype, column)
            score = editor.new("score", "aten.reshape", (score, column), kind_of, node)
        each = (Ref(editor.resolve(name)), score)
        part = editor.new("part", "aten.mul.Tensor", each, kind, node)
        total = (
            part
            if total is None
            else editor.new("total", "aten.add.Tensor", (total, part), kind, node)
        )
    assert total is not None  # a stack has a value
    return total

"""A pass that writes attention with sinks as one operator, which has forms for split sequences.

    scores = query @ key.mT * scale + mask
    columns = cat([scores, sinks.reshape(1, -1, 1, 1).expand(...)], -1)
    probs = softmax(columns - columns.max(-1, keepdim=True).values, -1)
    result = probs[..., :-1] @ value

Such attention has no fused kernel of its own, so gpt-oss's models write it out (transformers, eager
attention). See `operators/attention/sink_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, argument, rewrite
from autopar.operators.attention.sequence_forms import SINKS

_LOWEST = {"f16": -65504.0, "bf16": -3.3e38, "f32": -3.4e38, "f64": -1.7e308}  # nearly


@dataclass(frozen=True)
class _Attention:
    """The operands of attention with sinks, by name; `mask` is "" without one."""

    query: str
    key: str
    value: str
    sinks: str
    mask: str
    scale: float


def find_sinks(graph: Graph) -> Graph:
    """Returns `graph` with attention with sinks as one operator."""
    if all(node.op != "aten.cat" for node in graph.nodes):
        return graph

    def fuse(node: Node, editor: Editor) -> Node | None:
        found = _attention(node, graph)
        if found is None:
            return None
        names = found.query, found.key, found.value, *([found.mask] if found.mask else [])
        args: tuple[Arg, ...] = tuple(Ref(editor.resolve(name)) for name in names)
        kwargs: tuple[tuple[str, Arg], ...] = (
            ("scale", found.scale), ("sinks", Ref(editor.resolve(found.sinks))),
        )  # fmt: skip
        return replace(node, op=SINKS, args=args, kwargs=kwargs)

    return rewrite(graph, fuse)


def _attention(node: Node, graph: Graph) -> _Attention | None:
    """Returns the attention whose result is a product of weights and values; None for others."""
    if node.op != "aten.matmul" or len(node.type.shape) != 4:
        return None
    weights, value = (graph[name] for name in node.inputs)
    columns = _columns(weights, graph)
    if columns is None:
        return None
    scores, sinks = (graph[name] for name in columns.inputs)
    source = _sinks(sinks, graph)
    mask, product = _masked(scores, graph)
    scale, product = _scaled(product, graph)
    if source is None or mask is None or product.op != "aten.matmul":
        return None
    query, turned = (graph[name] for name in product.inputs)
    if turned.op != "aten.transpose.int" or {int(str(a)) % 4 for a in turned.args[1:]} != {2, 3}:
        return None
    key = graph[turned.inputs[0]]
    several = {kind.type.dtype for kind in (query, key, value, source)}
    lead = {kind.type.shape[:2] for kind in (query, key, value)}
    if len(several) > 1 or len(lead) > 1 or source.type.shape != query.type.shape[1:2]:
        return None
    return _Attention(query.name, key.name, value.name, source.name, mask, scale)


def _columns(weights: Node, graph: Graph) -> Node | None:
    """Returns the scores with sinks of which weights are the softmax, without its last column."""
    keys = weights.type.shape[-1]
    if weights.op != "aten.slice.Tensor" or argument(weights, 1, "dim", 0) not in (3, -1):
        return None
    whole = graph[weights.inputs[0]]
    if argument(weights, 2, "start") not in (0, None) or whole.type.shape[-1] != keys + 1:
        return None
    if whole.op != "aten.softmax.int" or argument(whole, 1, "dim") not in (3, -1):
        return None
    shifted = graph[whole.inputs[0]]
    if shifted.op == "aten.sub.Tensor" and len(shifted.inputs) == 2 and not shifted.kwargs:
        columns, largest = (graph[name] for name in shifted.inputs)
        if _is_largest(largest, columns, graph):
            shifted = columns
    joined = shifted.op == "aten.cat" and argument(shifted, 1, "dim", 0) in (3, -1)
    return shifted if joined and len(shifted.inputs) == 2 else None


def _is_largest(node: Node, columns: Node, graph: Graph) -> bool:
    """Returns whether a value is the maximum over the last dimension, which is kept."""
    if node.op == "getitem" and node.args[1] == 0:
        node = graph[node.inputs[0]]
    dim = argument(node, 1, "dim")
    last = dim in (3, -1, (3,), (-1,)) and argument(node, 2, "keepdim", False) is True
    return node.op in ("aten.max.dim", "aten.amax") and node.inputs[0] == columns.name and last


def _sinks(node: Node, graph: Graph) -> Node | None:
    """Returns the logits [heads] that are repeated for all batches and queries."""
    shape = node.type.shape
    if node.op != "aten.expand" or shape[-1] != 1:
        return None
    node = graph[node.inputs[0]]
    if node.op != "aten.reshape" or node.type.shape != (1, shape[1], 1, 1):
        return None
    source = graph[node.inputs[0]]
    return source if source.type.shape == (shape[1],) else None


def _masked(scores: Node, graph: Graph) -> tuple[str | None, Node]:
    """Returns the bool mask of scores, "" without one, None for another, and what it masks.

    A mask may be 0 or the lowest number. Since a sink is not masked, hidden keys have no weight
    even if a query sees none.
    """
    if scores.op != "aten.add.Tensor" or len(scores.inputs) != 2 or scores.kwargs:
        return "", scores
    product, mask = (graph[name] for name in scores.inputs)
    return _shown(mask, graph), product


def _shown(mask: Node, graph: Graph) -> str | None:
    """Returns the condition under which a mask is 0, if it is the lowest number elsewhere."""
    while mask.op in ("autopar.detach", "autopar.share", "aten.detach"):
        mask = graph[mask.inputs[0]]
    if not mask.op.startswith("aten.where"):
        return None
    seen, hidden = (_number(arg, graph) for arg in mask.args[1:3])
    lowest = _LOWEST.get(mask.type.dtype, -float("inf"))
    shown = mask.args[0]
    if seen != 0 or hidden is None or hidden > lowest or not isinstance(shown, Ref):
        return None
    return shown.name


def _number(arg: Arg, graph: Graph) -> float | None:
    """Returns a constant number; None for other arguments."""
    if isinstance(arg, Ref):
        node = graph[arg.name]
        if node.op in ("aten.expand", "aten.to.dtype", "autopar.detach", "aten.detach"):
            return _number(node.args[0], graph)
        if node.op == "aten.zeros":
            return 0.0
        numbers = {"aten.scalar_tensor": 0, "aten.full": 1}
        return _number(node.args[numbers[node.op]], graph) if node.op in numbers else None
    return float(arg) if isinstance(arg, (int, float)) else None


def _scaled(product: Node, graph: Graph) -> tuple[float, Node]:
    """Returns the number by which a value is multiplied, and this value."""
    if product.op.startswith("aten.mul") and len(product.inputs) == 1:
        factor = product.args[1]
        if isinstance(factor, (int, float)):
            return float(factor), graph[product.inputs[0]]
    return 1.0, product

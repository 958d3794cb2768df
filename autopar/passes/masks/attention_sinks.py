"""A pass that writes attention with sinks as one operator, which has forms for split sequences.

    scores = query @ key.mT * scale + mask
    columns = cat([scores, sinks.reshape(1, -1, 1, 1).expand(...)], -1)
    probs = softmax(columns - columns.max(-1, keepdim=True).values, -1)
    result = probs[..., :-1] @ value

Such attention has no fused kernel of its own, so gpt-oss's models write it out (transformers, eager
attention). A mask may be added, or select the scores by `where` or `masked_fill`. Attention under a
mask that does more than hide keys stays as it is. See `operators/attention/sink_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, argument, rewrite
from autopar.ir.tensor import TensorType
from autopar.operators.attention.sequence_forms import SINKS
from autopar.passes.masks.constant_masks import constant_numbers, constant_value, shown_by

_LOWEST = {"f16": -65504.0, "bf16": -3.3e38, "f32": -3.4e38, "f64": -1.7e308}  # nearly
_NOT, _EQUALS = "aten.logical_not", "aten.eq.Scalar"
_SAME = ("autopar.detach", "autopar.share", "aten.detach", "aten.expand")


@dataclass(frozen=True)
class _Shown:
    """A condition under which a query sees a key.

    Attributes:
        name: the value that tells.
        op: the operator that computes the condition from it; "" if it is the condition.
    """

    name: str
    op: str = ""

    def write(self, editor: Editor, like: Node) -> Ref:
        """Returns the condition, which is appended if necessary."""
        ref = Ref(editor.resolve(self.name))
        args: tuple[Arg, ...] = (ref, 0) if self.op == _EQUALS else (ref,)
        kind = TensorType("bool", editor[ref.name].type.shape)
        return editor.new("shown", self.op, args, kind, like) if self.op else ref


@dataclass(frozen=True)
class _Attention:
    """The operands of attention with sinks, by name, and its masks."""

    query: str
    key: str
    value: str
    sinks: str
    masks: tuple[_Shown, ...]
    scale: float


def find_sinks(graph: Graph) -> Graph:
    """Returns `graph` with attention with sinks as one operator."""
    if all(node.op != "aten.cat" for node in graph.nodes):
        return graph
    constants = frozenset(constant_numbers(graph))

    def fuse(node: Node, editor: Editor) -> Node | None:
        found = _attention(node, graph, constants)
        if found is None:
            return None
        names = found.query, found.key, found.value
        args: tuple[Arg, ...] = tuple(Ref(editor.resolve(name)) for name in names)
        masks = [mask.write(editor, node) for mask in found.masks]
        args += (_joined(masks, editor, node),) if masks else ()
        kwargs: tuple[tuple[str, Arg], ...] = (
            ("scale", found.scale), ("sinks", Ref(editor.resolve(found.sinks))),
        )  # fmt: skip
        return replace(node, op=SINKS, args=args, kwargs=kwargs)

    return rewrite(graph, fuse)


def _attention(node: Node, graph: Graph, constants: frozenset[str]) -> _Attention | None:
    """Returns the attention whose result is a product of weights and values; None for others."""
    if node.op != "aten.matmul" or len(node.type.shape) != 4:
        return None
    weights, value = (graph[name] for name in node.inputs)
    columns = _columns(weights, graph)
    if columns is None:
        return None
    scores, sinks = (graph[name] for name in columns.inputs)
    source = _sinks(sinks, graph)
    masks, product = _masked(scores, graph, constants)
    scale, product = _scaled(product, graph)
    if source is None or product.op != "aten.matmul":
        return None
    query, turned = (graph[name] for name in product.inputs)
    if turned.op != "aten.transpose.int" or {int(str(a)) % 4 for a in turned.args[1:]} != {2, 3}:
        return None
    key = graph[turned.inputs[0]]
    several = {kind.type.dtype for kind in (query, key, value, source)}
    lead = {kind.type.shape[:2] for kind in (node, query, key, value)}
    if len(several) > 1 or len(lead) > 1 or source.type.shape != query.type.shape[1:2]:
        return None
    return _Attention(query.name, key.name, value.name, source.name, masks, scale)


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


def _masked(
    scores: Node, graph: Graph, constants: frozenset[str]
) -> tuple[tuple[_Shown, ...], Node]:
    """Returns the masks of scores that hide keys, and what they mask.

    Since a sink is not masked, hidden keys have no weight even if a query sees none.
    """
    masks: list[_Shown] = []
    while True:
        found = _added(scores, graph, constants) or _selected(scores, graph)
        kept = found[1] if found else None
        if found is None or not isinstance(kept, Ref):
            return tuple(masks), scores
        masks.append(found[0])
        scores = graph[kept.name]


def _added(scores: Node, graph: Graph, constants: frozenset[str]) -> tuple[_Shown, Arg] | None:
    """Returns the mask that is added to scores if it only hides keys, and the scores."""
    if scores.op != "aten.add.Tensor" or len(scores.inputs) != 2 or scores.kwargs:
        return None
    for source, mask in (scores.args[:2], scores.args[1::-1]):
        shown = _shown(graph[mask.name], graph, constants) if isinstance(mask, Ref) else None
        if shown is not None:
            return shown, source
    return None


def _shown(mask: Node, graph: Graph, constants: frozenset[str]) -> _Shown | None:
    """Returns the condition under which a mask is 0, if it is the lowest number elsewhere."""
    if mask.name in constants and shown_by(constant_value(graph, mask.name)) is not None:
        return _Shown(mask.name, _EQUALS)
    while mask.op in _SAME:
        mask = graph[mask.inputs[0]]
    found = _selected(mask, graph)
    return found[0] if found and _number(found[1], graph) == 0 else None


def _selected(node: Node, graph: Graph) -> tuple[_Shown, Arg] | None:
    """Returns a condition, and the value that a node has there, if it is the lowest elsewhere."""
    if node.op.startswith("aten.where."):
        condition, seen, hidden = node.args[:3]
        turned = _is_lowest(seen, node, graph)
        seen, hidden = (hidden, seen) if turned else (seen, hidden)
    elif node.op.startswith("aten.masked_fill."):
        (seen, condition, hidden), turned = node.args[:3], True
    else:
        return None
    if not isinstance(condition, Ref) or not _is_lowest(hidden, node, graph):
        return None
    if graph[condition.name].type.dtype != "bool":
        return None
    if not turned:
        return _Shown(condition.name), seen
    while graph[condition.name].op in _SAME:
        condition = Ref(graph[condition.name].inputs[0])
    negated = graph[condition.name]
    if negated.op in (_NOT, "aten.bitwise_not") and graph[negated.inputs[0]].type.dtype == "bool":
        return _Shown(negated.inputs[0]), seen
    return _Shown(condition.name, _NOT), seen


def _is_lowest(value: Arg, node: Node, graph: Graph) -> bool:
    """Returns whether a value of a node is a number that leaves a key no weight."""
    number = _number(value, graph)
    return number is not None and number <= _LOWEST.get(node.type.dtype, -float("inf"))


def _joined(masks: list[Ref], editor: Editor, like: Node) -> Ref:
    """Returns the `and` of masks, which is appended if there are several."""
    whole, *others = masks
    for mask in others:
        shapes = [editor[one.name].type.shape for one in (whole, mask)]
        rank = max(map(len, shapes))
        sizes = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
        kind = TensorType("bool", tuple(map(max, sizes)))
        whole = editor.new("shown", "aten.logical_and", (whole, mask), kind, like)
    return whole


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
    name = product.op.split(".")[1] if "." in product.op else ""
    if name in ("mul", "div") and len(product.inputs) == 1 and not product.kwargs:
        factor = product.args[1] if len(product.args) == 2 else None
        if isinstance(factor, (int, float)) and factor:
            return float(factor if name == "mul" else 1 / factor), graph[product.inputs[0]]
    return 1.0, product

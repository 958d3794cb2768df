"""A pass that rewrites means as sums over counts, so that parts of a batch give partial sums."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, argument, number, rewrite
from autopar.ir.tensor import TensorType

MEAN, SUM = 1, 2  # at::Reduction
# Losses whose mean is over the elements of their broadcast operands -> index of `reduction`.
_ELEMENTWISE = {
    "aten.mse_loss": 2,
    "aten.l1_loss": 2,
    "aten.smooth_l1_loss": 2,
    "aten.huber_loss": 2,
    "aten.soft_margin_loss": 2,
    "aten.hinge_embedding_loss": 3,
    "aten.kl_div": 2,
    "aten.binary_cross_entropy": 3,
    "aten.binary_cross_entropy_with_logits": 4,
}
_POOLED = {f"aten.adaptive_avg_pool{space}d": space for space in (1, 2, 3)}
# Further losses -> index of `reduction`.
_OTHER = {
    "aten.multi_margin_loss": 5,
    "aten.multilabel_margin_loss": 2,
    "aten.ctc_loss.Tensor": 5,
    "aten.ctc_loss.IntList": 5,
    **_ELEMENTWISE,
}
LABELLED = {"aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d"}


def reduction_of(node: Node) -> int | None:
    """Returns how a loss reduces the losses of its samples, None if the operator is not a loss."""
    position = 3 if node.op in LABELLED else _OTHER.get(node.op)
    return None if position is None else number(argument(node, position, "reduction", MEAN), MEAN)


def lower_means(graph: Graph) -> Graph:
    """Returns `graph` with means and mean losses as a sum and a division by the count.

    The count is a number. If some labels may be ignored, it is the number of the other labels, or
    the sum of their classes' weights. Losses in float16, whose sums overflow, stay, and so
    do weighted ones of class probabilities, or of one sample.
    """

    def lower(node: Node, editor: Editor) -> Node | Ref | None:
        if node.is_leaf or len(node.types) != 1 or node.type.dtype == "f16":
            return None
        if node.op in ("aten.mean", "aten.mean.dim"):
            return _mean(node, editor)
        if node.op in _POOLED:
            return _pooled(node, editor)
        if node.op in _ELEMENTWISE:
            return _elementwise(node, editor)
        if node.op in LABELLED:
            return _labelled(node, editor)
        return None

    return rewrite(graph, lower)


def is_whole_mean(graph: Graph, node: Node) -> bool:
    """Returns whether `lower_means` created a node from a mean over all elements.

    It divides a sum by the number of its terms, and `lower_means` named the sum. Structure alone
    cannot decide: of 32 elements, `x.mean()` and `x.sum() / 32` are the same operators, but for
    twice as many samples only the first divides by 64. No traced node has such a name, as they are
    named after operators. Without it, `BatchFactors` would have to trace the model once more.
    """
    if node.op != "aten.div.Tensor" or node.type.shape != () or len(node.inputs) != 1:
        return False
    total = graph[node.inputs[0]]
    if not total.name.startswith(_total_name(node)):  # a number may follow
        return False
    if total.op in ("aten.sum", "aten.sum.dim_IntList"):
        return node.args[1] == graph[total.inputs[0]].type.numel
    return reduction_of(total) == SUM


def _total_name(node: Node) -> str:
    """Returns the name of the sum that a mean divides."""
    return f"{node.name}_sum"


def _mean(node: Node, editor: Editor) -> Node | None:
    whole = editor[node.inputs[0]].type
    if node.type.numel == 0 or whole.numel == 0:
        return None
    op = "aten.sum" if node.op == "aten.mean" else "aten.sum.dim_IntList"
    total = replace(node, name=editor.fresh(_total_name(node)), op=op)
    return _divided(node, total, whole.numel // node.type.numel, editor)


def _pooled(node: Node, editor: Editor) -> Node | None:
    """Rewrites pooling to a single pixel as a mean over space."""
    space = _POOLED[node.op]
    dims = tuple(range(-space, 0))
    if any(size != 1 for size in node.type.shape[-space:]):
        return None
    args = (node.args[0], dims, True)
    return _mean(replace(node, op="aten.mean.dim", args=args, kwargs=()), editor)


def _divided(node: Node, total: Node, count: Arg, editor: Editor) -> Node:
    """Returns `total / count` under the name of `node`."""
    editor.put(total)
    return replace(node, op="aten.div.Tensor", args=(Ref(total.name), count), kwargs=())


def _summed(node: Node, position: int, editor: Editor) -> Node:
    """Returns the loss with a sum instead of a mean."""
    kwargs = tuple(item for item in node.kwargs if item[0] != "reduction")
    name = editor.fresh(_total_name(node))
    if len(node.args) <= position:
        return replace(node, name=name, kwargs=(*kwargs, ("reduction", SUM)))
    args = (*node.args[:position], SUM, *node.args[position + 1 :])
    return replace(node, name=name, args=args, kwargs=kwargs)


def _elementwise(node: Node, editor: Editor) -> Node | None:
    position = _ELEMENTWISE[node.op]
    if argument(node, position, "reduction", MEAN) != MEAN:
        return None
    # `weight` and `pos_weight` may be wider than the losses; they do not count.
    shapes = [editor[name].type.shape for name in node.inputs[:2]]
    count = TensorType(node.type.dtype, _broadcast(*shapes)).numel
    return _divided(node, _summed(node, position, editor), count, editor) if count else None


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(m if n == 1 else n for m, n in zip(a, b, strict=True))


def _labelled(node: Node, editor: Editor) -> Node | None:
    if argument(node, 3, "reduction", MEAN) != MEAN:
        return None
    scores, labels = (editor[name] for name in node.inputs[:2])
    weight, shape = argument(node, 2, "weight"), scores.type.shape
    count: Arg
    if isinstance(weight, Ref):
        if labels.type.floating or not labels.type.shape:
            return None
        count = _sum_of_weights(node, labels, weight, editor)
    elif labels.type.floating:  # class probabilities: every position counts
        count = scores.type.numel // shape[1 if len(shape) > 1 else 0] if scores.type.numel else 0
        if not count:
            return None
    else:
        kind = TensorType("bool", labels.type.shape)
        args = (Ref(labels.name), _ignored(node))
        counted = editor.new("counted", "aten.ne.Scalar", args, kind, node)
        count = editor.new("count", "aten.sum", (counted,), TensorType("i64", ()), node)
    return _divided(node, _summed(node, 3, editor), count, editor)


def _ignored(node: Node) -> int:
    """Returns the label that a loss ignores."""
    return int(number(argument(node, 4, "ignore_index"), -100))


def _sum_of_weights(node: Node, labels: Node, weight: Ref, editor: Editor) -> Ref:
    """Returns the sum of the classes' weights over the labels that are not ignored."""
    size, dtype = (labels.type.numel,), editor[weight.name].type.dtype
    mask, picked = TensorType("bool", size), TensorType(dtype, size)

    flat = Ref(labels.name)
    if len(labels.type.shape) > 1:
        kind = TensorType(labels.type.dtype, size)
        flat = editor.new("labels", "aten.reshape", (flat, size), kind, node)
    ignored = editor.new("ignored", "aten.eq.Scalar", (flat, _ignored(node)), mask, node)
    kind = TensorType(labels.type.dtype, size)
    known = editor.new("known", "aten.masked_fill.Scalar", (flat, ignored, 0), kind, node)
    weights = editor.new("weights", "aten.index_select", (weight, 0, known), picked, node)
    args = (weights, ignored, 0)
    counted = editor.new("counted", "aten.masked_fill.Scalar", args, picked, node)
    return editor.new("count", "aten.sum", (counted,), TensorType(dtype, ()), node)

"""Losses: a sum over a split batch is a partial sum; classes can be split if targets are labels.

A mean over a part is not a part of the mean, so a loss with mean reduction stays whole; the passes
rewrite such a loss as a sum and a division by the global count.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import all_whole, argument, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType

NONE, MEAN, SUM = 0, 1, 2


def _multi_margin(node: Node, types: tuple[TensorType, ...]) -> str:
    """Scores (batch, class); their number scales the loss of a sample."""
    reduction = argument(node, 5, "reduction", MEAN)
    if reduction == MEAN or len(types[0].shape) != 2:
        return all_whole(node, types)
    return f"b c!, b, c! -> {'b' if reduction == NONE else ''}"


def _by_class(node: Node, types: tuple[TensorType, ...]) -> str:
    """Scores (class), (batch, class) or (batch, class, ...); targets are classes or weights.

    Every device reads the scores of the labels that it has. Cross entropy also needs the sum of all
    scores' exponentials, which devices exchange.
    """
    reduction = argument(node, 3, "reduction", MEAN)
    if reduction == MEAN:
        return all_whole(node, types)
    rank = len(types[0].shape)
    samples = [f"b{i}" for i in range(rank - 1)]
    labelled, entropy = len(types[1].shape) < rank, node.op == "aten.cross_entropy_loss"
    classes = "c~" if entropy else "c"
    if not labelled or (entropy and len(types) > 2):
        classes = "c!"
    scores = [*samples[:1], classes, *samples[1:]]
    targets = samples if labelled else scores
    result = samples if reduction == NONE else []
    return f"{' '.join(scores)}, {' '.join(targets)}, {classes} -> {' '.join(result)}"


def _elementwise(position: int) -> Callable[[Node, tuple[TensorType, ...]], str]:
    """Returns the rule of an elementwise loss; argument `position` is the reduction."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        reduction = argument(node, position, "reduction", MEAN)
        if reduction == MEAN:
            return all_whole(node, types)
        return f"..., ..., ..., ... -> {'...' if reduction == NONE else ''}"

    return spec


_SCORES = "f64[4, 6]"
_CLASSES = (
    f"{_SCORES}, i64[4]<6, None, 2",
    f"{_SCORES}, i64[4]<6, const f64[6]>0, 2, 3",
    "f64[4, 3, 6], i64[4, 6]<3, None, 0",
    f"{_SCORES}, i64[4]<6",
    "f64[6], i64[]<6, None, 2",
    "f64[4, 7], i64[4]<7, None, 2, 0",
)
_PAIR = "f64[4, 6]<1, f64[4, 6]<1"
_LOSSES = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "kl_div": 2,
    "hinge_embedding_loss": 3,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
_LABELS = {"soft_margin_loss": "f64[4, 6], const f64[4, 6]"}  # no gradient reaches the target
RULES = (
    rule(
        "aten.cross_entropy_loss",
        _by_class,
        flops=lambda node, types: f"5 {types[0].numel}",
        examples=(
            *_CLASSES,
            f"{_SCORES}, f64[4, 6]>0, None, 2, -100, 0.1",
            f"{_SCORES}, i64[4]<6, None, 2, 1, 0.1",
        ),
    ),
    rule(
        "aten.multi_margin_loss",
        _multi_margin,
        examples=(
            f"{_SCORES}, i64[4]<6, reduction=2",
            f"{_SCORES}, i64[4]<6, 1, 1.0, None, 0",
            f"{_SCORES}, i64[4]<6",
        ),
    ),
    rule(
        "autopar.ctc_losses",
        "t! b c!, b s!, b, b -> b",
        flops=lambda node, types: f"20 {types[0].shape[0] * types[1].numel}",
        examples=(
            "f64[6, 4, 5], i64[4, 3]<4, i64[4]<6, i64[4]<3, 4, True",
            "f64[5, 4, 5], i64[4, 1]<4, const i64[4]<1, const i64[4]<1, 4, False",
        ),
    ),
    rule("aten.nll_loss_nd", _by_class, examples=_CLASSES),
    rule("aten.nll_loss", _by_class, examples=_CLASSES[:2]),
    *(
        rule(
            f"aten.{op}",
            _elementwise(position),
            examples=tuple(
                f"{_LABELS.get(op, _PAIR)}, reduction={reduction}"
                for reduction in (NONE, MEAN, SUM)
            ),
        )
        for op, position in _LOSSES.items()
    ),
)

"""The last linear and the cross entropy of what it gives: logits exist for some rows at a time."""

from __future__ import annotations

from autopar.ir.fusion.pattern import Match, Pattern, Writer, call, computes
from autopar.ir.graph import Ref
from autopar.ir.rewrite import argument, number
from autopar.ir.tensor import TensorType

_SUM = 2  # at::Reduction


def _fits(match: Match) -> bool:
    found = match.found
    return (
        argument(found, 3, "reduction") == _SUM
        and argument(found, 2, "weight") is None
        and argument(found, 5, "label_smoothing", 0.0) == 0.0
        and not match.type("labels").floating
        and match.type("labels").numel * match.type("x").shape[-1] == match.type("x").numel
        and len(match.graph[found.inputs[0]].type.shape) == 2  # rows of classes
        and computes(match, "x", "weight")
        and found.type.dtype == "f32"
        and found.requires_grad
    )


def _write(match: Match, writer: Writer) -> None:
    """Labels in the shape of the rows of x, from which they mostly come."""
    rows = match.type("x").shape[:-1]
    labels = match.node("labels")
    assert labels is not None
    while labels.type.shape != rows and labels.op == "aten.reshape":
        labels = match.graph[labels.inputs[0]]
    value = Ref(labels.name)
    if labels.type.shape != rows:
        kind = TensorType(labels.type.dtype, rows)
        value = writer.new("labels", "aten.reshape", (match.values["labels"], rows), kind, False)
    ignored = number(argument(match.found, 4, "ignore_index"), -100)
    args = (match.values["x"], match.values["weight"], value, ignored)
    call(match, writer, "linear_cross_entropy", args)


PATTERNS = (
    Pattern(
        "linear_cross_entropy",
        "linear_cross_entropy",
        ("cross_entropy_loss(viewed(wide(viewed(linear(x, weight)))), labels, ...)",),
        ("x", "weight", "labels"),
        fits=_fits,
        write=_write,
        outputs=True,
    ),
)

"""The last linear and its cross entropy: logits exist only for some rows at a time.

Logits may be sliced in between, as in next-token prediction, which drops the last position; the
rows are then dropped before the linear.
"""

from __future__ import annotations

from autopar.ir.fusion.pattern import Match, Pattern, Writer, call, computes
from autopar.ir.graph import Ref
from autopar.ir.rewrite import argument, number
from autopar.ir.tensor import TensorType

_SUM = 2  # at::Reduction


def _fits(match: Match) -> bool:
    loss = match.found
    return (
        argument(loss, 3, "reduction") == _SUM
        and argument(loss, 2, "weight") is None
        and argument(loss, 5, "label_smoothing", 0.0) == 0.0
        and not match.type("labels").floating
        and match.type("labels").numel * match.type("x").shape[-1] == _rows(match).numel
        and match.values.get("dim", 0) in range(len(match.type("x").shape) - 1)
        and len(match.graph[loss.inputs[0]].type.shape) == 2  # rows of classes
        and computes(match, "x", "weight")
        and loss.type.dtype == ("f64" if match.type("x").dtype == "f64" else "f32")
        and loss.requires_grad
    )


def _rows(match: Match) -> TensorType:
    """Returns the type of the rows of x whose logits are used."""
    kind = match.type("x")
    dim, start, end = (match.values.get(name) for name in ("dim", "start", "end"))
    if not (isinstance(dim, int) and isinstance(start, int) and isinstance(end, int)):
        return kind
    shape = (*kind.shape[:dim], end - start, *kind.shape[dim + 1 :])
    return TensorType(kind.dtype, shape)


def _write(match: Match, writer: Writer) -> None:
    """Writes the kernel with labels in the shape of the rows of x, which they usually come from."""
    x, kind = match.values["x"], _rows(match)
    source = match.node("x")
    if source is not None and kind != source.type:
        args = (x, *(match.values[name] for name in ("dim", "start", "end")))
        x = writer.new("rows", "aten.slice.Tensor", args, kind, source.requires_grad)
    rows = kind.shape[:-1]
    labels = match.node("labels")
    assert labels is not None
    while labels.type.shape != rows and labels.op == "aten.reshape":
        labels = match.graph[labels.inputs[0]]
    value = Ref(labels.name)
    if labels.type.shape != rows:
        kind = TensorType(labels.type.dtype, rows)
        value = writer.new("labels", "aten.reshape", (match.values["labels"], rows), kind, False)
    ignored = number(argument(match.found, 4, "ignore_index"), -100)
    call(match, writer, "linear_cross_entropy", (x, match.values["weight"], value, ignored))


PATTERNS = (
    Pattern(
        "linear_cross_entropy",
        "linear_cross_entropy",
        tuple(
            f"cross_entropy_loss(viewed(wide(viewed({logits}))), labels, ...)"
            for logits in ("linear(x, weight)", "slice(linear(x, weight), dim, start, end)")
        ),
        ("x", "weight", "labels"),
        fits=_fits,
        write=_write,
        outputs=True,
    ),
)

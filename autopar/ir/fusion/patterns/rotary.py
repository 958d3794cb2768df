"""Rotary position embedding with halves, as Llama has it: x cos + rotate_half(x) sin.

The kernel reads the angles of the first half only. It applies where the second half is provably
equal: both come from `cat((angles, angles), -1)`.
"""

from __future__ import annotations

from autopar.ir.fusion.pattern import PREFIX, Match, Pattern, Writer, computes
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.tensor import TensorType

_SPELLING = "x * cos + cat((-slice(x, 3, half, width), slice(x, 3, 0, half)), -1) * sin"
# Operators that keep every element in its place.
_ELEMENTWISE = ("aten.cos", "aten.sin", "aten.to.dtype", "aten.mul.Tensor", "autopar.detach")
_VIEWS = ("aten.unsqueeze", "aten.reshape", "aten.expand", "aten.slice.Tensor", "aten.select.int")


def _fits(match: Match) -> bool:
    x = match.type("x").shape
    half, wide = match.values["half"], match.values["width"]
    if not (isinstance(half, int) and len(x) == 4 and x[-1] == wide == 2 * half):
        return False
    if match.found.type != match.type("x") or not computes(match, "x"):
        return False
    angles = [match.node(name) for name in ("cos", "sin")]
    return _heads_first(match) is not None and all(
        node is not None
        and not node.requires_grad
        and node.type == match.type("cos")
        and _halves_are_alike(match.graph, node)
        for node in angles
    )


def _heads_first(match: Match) -> bool | None:
    """Returns True for x of (batch, head, row, width), False for (batch, row, head, width)."""
    (_, a, b, width), cos = match.type("x").shape, match.type("cos").shape
    if cos == (1, 1, b, width):
        return True
    return False if cos == (1, a, 1, width) else None


def _halves_are_alike(graph: Graph, node: Node) -> bool:
    """Returns whether the halves of each row are equal, being concatenated from equal parts."""
    while True:
        if node.op in ("aten.cat", "aten.concat"):
            parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
            last = dim in (-1, len(node.type.shape) - 1)
            return last and isinstance(parts, tuple) and len(parts) == 2 and parts[0] == parts[1]
        if not node.inputs or node.op not in (*_ELEMENTWISE, *_VIEWS):
            return False
        source = graph[node.inputs[0]]
        row = source.type.shape[-1:] == node.type.shape[-1:]
        if not row or len(node.inputs) > 1:
            return False
        node = source


def _write(match: Match, writer: Writer) -> None:
    """Writes the kernel on (batch, row, head, width), with transposes around it if needed."""
    x, last = match.node("x"), match.found
    assert x is not None
    first = _heads_first(match)
    source, kind, grad = Ref(x.name), x.type, last.requires_grad
    if first:
        b, h, s, d = kind.shape
        kind = TensorType(kind.dtype, (b, s, h, d))
        if x.op == "aten.transpose.int" and x.args[1:] == (1, 2):
            source = Ref(x.inputs[0])
        else:
            source = writer.new("rows", "aten.transpose.int", (source, 1, 2), kind, grad)
    angles = []
    for name in ("cos", "sin"):
        given = match.type(name)
        rows = (kind.shape[1], given.shape[-1])
        table = TensorType(given.dtype, rows)
        angles.append(writer.new(name, "aten.reshape", (match.values[name], rows), table, False))
    op, args = f"{PREFIX}rotary", (source, *angles)
    if not first:
        writer.nodes.append(Node(last.name, op, args, (), (kind,), last.source, grad))
        return
    turned = writer.new("rotated", op, args, kind, grad)
    writer.nodes.append(
        Node(last.name, "aten.transpose.int", (turned, 1, 2), (), last.types, last.source, grad)
    )


PATTERNS = (
    Pattern("rotary", "rotary", (_SPELLING,), ("x", "cos", "sin"), fits=_fits, write=_write),
)

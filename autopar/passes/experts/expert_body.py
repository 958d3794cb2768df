"""Recognises the computation of one expert: products, biases, and the operators between them.

    %both = grouped(%rows, %into, %ends)           # + index(%bias, (%chosen,))
    %inner = ... element by element, of halves of %both or of all of it
    %found = grouped(%inner, %out, %ends)          # + index(%bias, (%chosen,))

Halves are gates and the others: the first and the second ones, or the even and the odd ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.rewrite import argument, dimension, number
from autopar.operators.activation import ACTIVATIONS
from autopar.operators.mixture import GROUPED

GROUPED_PRODUCTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback", GROUPED)
_END = 2**63 - 1
_HALVED = {"": ("up",), "concatenated": ("gate", "up"), "interleaved": ("gate", "up")}
_NAMES = {
    "aten.add.Tensor": "add", "aten.sub.Tensor": "sub", "aten.mul.Tensor": "mul",
    "aten.div.Tensor": "div", "aten.pow.Tensor_Scalar": "pow", "aten.neg": "neg",
    "aten.exp": "exp", "aten.square": "square", "aten.sigmoid": "sigmoid", "aten.tanh": "tanh",
    "aten.silu": "silu", "aten.relu": "relu", "aten.softplus": "softplus", "aten.clamp": "clamp",
}  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One product of rows that are sorted by expert.

    Attributes:
        rows: the rows.
        weight: the weights, [experts, out, in], or [experts, in, out] if `turned`.
        turned: see `weight`.
        bias: [experts, out], or "".
        ends: where each expert's rows end.
        chosen: the expert of every row, "" without a bias.
    """

    rows: str
    weight: str
    turned: bool
    bias: str
    ends: str
    chosen: str


@dataclass(frozen=True)
class Body:
    """Computation of an expert.

    Attributes:
        into, out: its products.
        halves: "concatenated", "interleaved", or "" without gates.
        act: the operators between them, as in `autopar/operators/activation.py`.
    """

    into: Product
    out: Product
    halves: str
    act: str


def find_body(name: str, graph: Graph) -> Body | None:
    """Returns the body that ends in the value `name`, None if there is none."""
    out = _product(graph[name], graph)
    if out is None:
        return None
    reader = _Reader(graph)
    text = reader.text(graph[out.rows])
    into = _product(graph[reader.both], graph) if text and reader.both else None
    names = _HALVED.get(reader.halves, ())
    if into is None or (out.ends != into.ends) or reader.seen - set(names):
        return None
    if into.chosen and out.chosen and into.chosen != out.chosen:
        return None
    if reader.halves:
        for act in ACTIVATIONS:
            if text in (f"mul({act}(gate), up)", f"mul(up, {act}(gate))"):
                text = act
    return Body(into, out, reader.halves, text)


def _product(node: Node, graph: Graph) -> Product | None:
    """Returns the product that a value is, with or without a bias."""
    bias = chosen = ""
    if node.op == "aten.add.Tensor" and len(node.args) == 2:
        value, added = node.args
        found = graph[added.name] if isinstance(added, Ref) else node
        if not isinstance(value, Ref) or found.op != "aten.index.Tensor":
            return None
        source, places = found.args
        if not (isinstance(source, Ref) and isinstance(places, tuple) and len(places) == 1):
            return None
        if not isinstance(places[0], Ref) or len(graph[source.name].type.shape) != 2:
            return None
        node, bias, chosen = graph[value.name], source.name, places[0].name
    if node.op not in GROUPED_PRODUCTS or len(node.args) < 3:
        return None
    rows, weight, ends = (arg.name if isinstance(arg, Ref) else "" for arg in node.args[:3])
    if not (rows and weight and ends) or len(graph[weight].type.shape) != 3:
        return None
    turned, maker = node.op != GROUPED, graph[weight]
    if turned and maker.op == "aten.transpose.int" and maker.args[1:] in ((1, 2), (-2, -1), (2, 1)):
        turned, weight = False, maker.inputs[0]
    return Product(rows, weight, turned, bias, ends, chosen)


def function_name(node: Node) -> str:
    """Returns the name of an operator element by element, "" for others."""
    if node.op == "aten.gelu":
        return "gelu_tanh" if node.keyword("approximate", "none") == "tanh" else "gelu"
    return "" if node.kwargs else _NAMES.get(node.op, "")


class _Reader:
    """Writes the values between the products as text.

    Attributes:
        both: the first product, once it is reached.
        halves: how it is halved.
        seen: names in the text.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.both, self.halves = graph, "", "?"
        self.seen: set[str] = set()

    def text(self, node: Node, depth: int = 0) -> str:
        """Returns the text of a value, "" if it has none."""
        leaf = self._leaf(node)
        if leaf:
            self.seen.add(leaf)
            return leaf
        name = function_name(node)
        if not name or depth > 20 or not node.args:
            return ""
        parts = [self._argument(arg, depth) for arg in node.args]
        return f"{name}({', '.join(parts)})" if all(parts) else ""

    def _argument(self, arg: Arg, depth: int) -> str:
        if isinstance(arg, Ref):
            return self.text(self.graph[arg.name], depth + 1)
        plain = arg is None or (isinstance(arg, int | float) and not isinstance(arg, bool))
        return repr(arg) if plain and not isinstance(arg, Name) else ""

    def _leaf(self, node: Node) -> str:
        """Returns "gate" or "up" if a value is that, else ""."""
        whole = _product(node, self.graph) is not None
        if whole:
            return "up" if self._of(node.name, "") else ""
        if node.op != "aten.slice.Tensor" or not isinstance(node.args[0], Ref):
            return ""
        source = self.graph[node.args[0].name]
        if _product(source, self.graph) is None:
            return ""
        width = source.type.shape[-1]
        start, end, step = (
            number(argument(node, at, name, default), default)
            for at, name, default in ((2, "start", 0), (3, "end", _END), (4, "step", 1))
        )
        if dimension(argument(node, 1, "dim"), 2) != 1 or width % 2:
            return ""
        cases = {
            (0, width // 2, 1): ("concatenated", "gate"),
            (width // 2, width, 1): ("concatenated", "up"),
            (0, width, 2): ("interleaved", "gate"),
            (1, width, 2): ("interleaved", "up"),
        }
        halves, name = cases.get((start, min(end, width), step), ("", ""))
        return name if name and self._of(source.name, halves) else ""

    def _of(self, both: str, halves: str) -> bool:
        """Returns whether all leaves are of one product, halved in one way."""
        fits = self.both in ("", both) and self.halves in ("?", halves)
        self.both, self.halves = both, halves
        return fits

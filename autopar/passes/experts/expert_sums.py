"""Reads sums of experts: which products one expert is, and which of them a value adds up.

%h = where(%mask, %x, 1)               # rows of other tokens hold ones, or all tokens do
%y = linear(f(linear(%h, %up)), %down)
%more = where(%mask, %sum + %scale * %y, %sum)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir.graph import Graph, Name, Node, Ref
from autopar.operators.activation import ACTIVATIONS
from autopar.passes.experts.chosen_elements import is_zero
from autopar.passes.experts.expert_body import function_name

LINEAR = "aten.linear"
_DEEPEST, _LONGEST = 20, 500  # values one within another, and characters of a text


@dataclass(frozen=True)
class Expert:
    """One expert.

    Attributes:
        rows: the value that its first products read.
        gate, up, down: its products, `gate` "" for none.
        act: the operators between them, see `operators/activation.py`.
    """

    rows: str
    gate: str
    up: str
    down: str
    act: str


@dataclass(frozen=True)
class Addend:
    """An expert's part of a sum.

    Attributes:
        expert: the expert.
        x: all tokens.
        masks: masks of the rows in which the part is not zero, or replaces the sum so far.
        scales: factors of its rows.
        sets: whether it replaces what was there.
    """

    expert: Expert
    x: str
    masks: tuple[str, ...]
    scales: tuple[str, ...]
    sets: bool


@dataclass(frozen=True)
class Sum:
    """A value that adds up experts, and other values."""

    addends: tuple[Addend, ...]
    others: tuple[str, ...]


def bare(name: str, graph: Graph) -> str:
    """Returns the value of which one is a view with the same elements in the same order."""
    return _path(name, graph)[-1]


def read_sum(name: str, graph: Graph) -> Sum:
    """Returns the parts that a value adds up; a sum with other readers is one part."""
    reader = _SumReader(graph)
    reader.read(name)
    return Sum(tuple(reader.addends[::-1]), tuple(reader.others))


@dataclass(frozen=True)
class _Part:
    """A part of a sum: a value, its masks, and whether it replaces the sum so far."""

    name: str
    masks: tuple[str, ...] = ()
    sets: bool = False


class _SumReader:
    """Decomposes a sum into its parts.

    Attributes:
        inside: values that only the sum reads.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.addends: list[Addend] = []
        self.others: list[str] = []
        self.inside: set[str] = set()
        self.results = {result for _, result in graph.outputs}

    def read(self, root: str) -> None:
        width = self.graph[root].type.shape[-1:]
        waiting = [_Part(root)]
        while waiting:
            part = waiting.pop()
            path = _path(part.name, self.graph)
            node = self.graph[path[-1]]
            alone = part.name == root or self._alone(path)
            parts = self._parts(node) if alone and not part.masks else None
            if self.graph[part.name].type.shape[-1:] != width or node.type.shape[-1:] != width:
                self.others.append(part.name)
            elif parts is not None:
                self.inside.update(path)
                waiting += parts
            elif (addend := _addend(node, part, self.graph)) is not None:
                self.addends.append(addend)
            else:
                self.others.append(part.name)

    def _alone(self, path: list[str]) -> bool:
        """Returns whether only the sum reads a value and its views."""
        known = self.inside | set(path)
        users = (user for name in path for user in self.graph.users[name])
        return self.results.isdisjoint(path) and all(user in known for user in users)

    def _parts(self, node: Node) -> list[_Part] | None:
        """Returns the parts that a node adds up; None if it is no sum."""
        if node.op == "aten.add.Tensor" and not node.kwargs:
            return [_Part(ref.name) for ref in _pair(node)] or None
        if node.op != "aten.where.self":
            return None
        mask, new, old = node.inputs
        if is_zero(self.graph[old]) and not self.graph[old].type.shape:
            return None  # a masked part of a sum
        before, mask = bare(old, self.graph), bare(mask, self.graph)
        added = self.graph[bare(new, self.graph)]
        pair = _pair(added) if added.op == "aten.add.Tensor" and not added.kwargs else []
        for kept, more in (pair, pair[::-1]) if pair else ():
            held = masked(kept.name, self.graph)
            if held is not None and (held[0], bare(held[1], self.graph)) == (mask, before):
                for name in (new, kept.name, held[1]):
                    self.inside.update(_path(name, self.graph))
                self.inside.discard(before)
                return [_Part(old), _Part(more.name, (mask,))]
        return [_Part(old), _Part(new, (mask,), True)]


def _path(name: str, graph: Graph) -> list[str]:
    """Returns a value and the values of which it is a view with the same order of elements."""
    path = [name]
    while graph[path[-1]].op in ("aten.reshape", "aten.unsqueeze"):
        path.append(graph[path[-1]].inputs[0])
    return path


def _pair(node: Node) -> list[Ref]:
    pair = [arg for arg in node.args if isinstance(arg, Ref)]
    return pair if len(pair) == len(node.args) == 2 else []


def masked(name: str, graph: Graph) -> tuple[str, str] | None:
    """Returns the mask and the values of a value that holds ones elsewhere, None if it is none."""
    node = graph[bare(name, graph)]
    if node.op != "aten.where.self":
        return None
    mask, value, other = node.inputs
    return (bare(mask, graph), value) if graph[other].op == "aten.ones" else None


def _addend(node: Node, part: _Part, graph: Graph) -> Addend | None:
    """Returns the expert of a part of a sum, with its factors."""
    scales: list[str] = []
    masks = part.masks
    while node.op != LINEAR:
        if node.op == "aten.mul.Tensor" and len(_pair(node)) == 2:
            left, right = (graph[ref.name] for ref in _pair(node))
            if _narrow(left, node) == _narrow(right, node):
                return None
            scale, rows = (left, right) if _narrow(left, node) else (right, left)
            scales.append(scale.name)
        elif node.op == "aten.where.self" and is_zero(graph[node.inputs[2]]):
            masks = (*masks, bare(node.inputs[0], graph))
            rows = graph[node.inputs[1]]
        elif node.op == "aten.to.dtype" and graph[node.inputs[0]].type.floating:
            rows = graph[node.inputs[0]]
        else:
            return None
        node = graph[bare(rows.name, graph)]
    expert = read_expert(node, graph)
    if expert is None:
        return None
    held = masked(expert.rows, graph)
    if held is None:
        return Addend(expert, expert.rows, masks, tuple(scales), part.sets)
    mask, x = held  # rows without the mask are not the tokens'
    return Addend(expert, x, masks, tuple(scales), part.sets) if mask in masks else None


def _narrow(scale: Node, product: Node) -> bool:
    """Returns whether a factor is one number for each row."""
    shape = product.type.shape
    return scale.type.shape == (*shape[:-1], 1) != shape


def read_expert(down: Node, graph: Graph) -> Expert | None:
    """Returns the expert that ends in a linear, None if it is none."""
    products: list[str] = []

    def leaf(node: Node) -> str:
        if node.op != LINEAR:
            return ""
        if node.name not in products:
            products.append(node.name)
        return f"@{products.index(node.name)}"

    text = text_of(graph[down.inputs[0]], leaf, graph)
    rows = {graph[name].inputs[0] for name in products}
    if not text or len(rows) != 1 or len(products) > 2:
        return None
    act, gate, up = named_products(text, products)
    return Expert(rows.pop(), gate, up, down.name, act)


def text_of(node: Node, leaf: Callable[[Node], str], graph: Graph, depth: int = 0) -> str:
    """Returns the operators between products as text, "" if some operator has no text.

    Args:
        node: the last value.
        leaf: returns "@0" for the first product, "@1" for the second, "" for other values.
        graph: the graph.
        depth: number of values read so far.
    """
    if found := leaf(node):
        return found
    name = function_name(node)
    if not name or depth > _DEEPEST or not node.args:
        return ""
    parts = []
    for arg in node.args:
        if isinstance(arg, Ref):
            part = text_of(graph[arg.name], leaf, graph, depth + 1)
        else:
            plain = arg is None or (isinstance(arg, int | float) and not isinstance(arg, bool))
            part = repr(arg) if plain and not isinstance(arg, Name) else ""
        if not part:
            return ""
        parts.append(part)
    text = f"{name}({', '.join(parts)})"
    return text if len(text) <= _LONGEST else ""


def named_products(text: str, products: list[str]) -> tuple[str, str, str]:
    """Returns the text with names, the product called gate, and the one called up."""
    if len(products) == 1:
        written = text.replace("@0", "up")
        return next((a for a in ACTIVATIONS if written == f"{a}(up)"), written), "", products[0]
    for gate, up in ((0, 1), (1, 0)):
        written = text.replace(f"@{gate}", "gate").replace(f"@{up}", "up")
        for act in ACTIVATIONS:
            if written in (f"mul({act}(gate), up)", f"mul(up, {act}(gate))"):
                return act, products[gate], products[up]
    return text.replace("@0", "gate").replace("@1", "up"), products[0], products[1]

"""Names of variables: a reader of the emitted program should recognise the model in them."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from itertools import zip_longest

from autopar.ir.graph import Graph, Node
from autopar.operators.assume import ASSUME
from autopar.operators.own_functions import called

# Names that mean something else in a generated program.
RESERVED = (
    *dir(builtins),
    "torch",
    "F",
    "aten",
    "mesh",
    "kernels",
    "functions",
    "p",
    "batch",
    "outputs",
    "i",
    "names",
    "received",
    "stored",
    "together",
    "Piece",
    "block",
    "checkpoint",
    "keep_products",
    "repeatable",
)
# Operators that stand for a layout and compute nothing.
IDENTITIES = ("autopar.share", "autopar.shard")
_LONGEST = 60  # characters of a name
_WORDS = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "cross_entropy",
    "slice": "part",
    "sum": "total",
    "pow": "power",
}
# Operators whose result is named after their module in the user's code.
_NAMED_AFTER_MODULE = (
    "aten.linear", "aten.layer_norm", "aten.rms_norm", "aten.embedding", "aten.gelu", "aten.silu",
    "aten.relu", "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.batch_norm", "aten.dropout",
    "kernels.rms_norm", "kernels.add_rms_norm", "kernels.add_layer_norm", "kernels.swiglu",
    "kernels.geglu", "kernels.gelu",
)  # fmt: skip


class Names:
    """The names of one function's variables, each given out once.

    Args:
        graph: whose values are named.
        nodes: those that the function computes, in order.
    """

    def __init__(self, graph: Graph, nodes: Iterable[Node]) -> None:
        self.graph = graph
        self._taken = set(RESERVED)
        self._assigned = _assigned([node for node in nodes if node.op not in IDENTITIES])

    def take(self, name: str) -> None:
        """Give this name to nothing else."""
        self._taken.add(name)

    def fresh(self, wish: str) -> str:
        """A name like `wish` that nothing has yet."""
        wish = identifier(wish)
        name, count = wish, 1
        while name in self._taken:
            count += 1
            name = f"{wish}_{count}"
        self._taken.add(name)
        return name

    def wish(self, node: Node) -> str:
        """The name that a person would give a node's value."""
        if node.is_leaf:
            parts = [part for part in node.target.split(".") if not part.isdigit()]
            start = node.keyword("start")
            return "_".join(parts[-2:]) + (f"_{start}" if start is not None else "")
        if node.op in IDENTITIES or node.op == ASSUME:
            return self.wish(self.graph[node.inputs[0]])
        module = node.source.module.rpartition(".")[2]
        op = node.op
        if op == "getitem" and node.args[1] == 0:  # a kernel's first result is its own
            op = self.graph[node.inputs[0]].op
        if op in _NAMED_AFTER_MODULE and module.isidentifier():
            return module
        if node.name in self._assigned:
            return self._assigned[node.name]
        if (function := called(node)) is not None:
            return re.split(r"[.:]", function[0])[-1].lower()
        word = node.op.split(".")[1] if "." in node.op else node.op
        return _WORDS.get(word, word).strip("_")


def identifier(wish: str) -> str:
    """A name like `wish` that Python takes and that reads in one way only: letters of ASCII."""
    name = re.sub(r"\W", "_", wish, flags=re.ASCII)[:_LONGEST]
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"v_{name}"


def _assigned(nodes: list[Node]) -> dict[str, str]:
    """The last node of a line `name = ...` of the user's code -> that name."""
    names: dict[str, str] = {}
    for node, after in zip_longest(nodes, nodes[1:]):
        last = after is None or after.source != node.source
        match = re.match(r"([A-Za-z_]\w*)\s*[-+*/]?=(?!=)", node.source.text)
        if last and match:
            names[node.name] = match[1]
    return names

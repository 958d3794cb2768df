"""Names of variables: a reader of the emitted program should recognise the model in them."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from itertools import zip_longest

from autopar.ir.graph import WRITE, Graph, Node
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
# Operators with several results -> what these are.
_RESULTS = {
    "var_mean": ("variance", "mean"), "std_mean": ("deviation", "mean"),
    "topk": ("values", "indices"), "sort": ("values", "indices"), "max": ("values", "indices"),
    "min": ("values", "indices"), "kthvalue": ("values", "indices"),
}  # fmt: skip
# Operators whose result is named after their module in the user's code.
_NAMED_AFTER_MODULE = (
    "aten.linear", "aten.layer_norm", "aten.rms_norm", "aten.embedding", "aten.gelu", "aten.silu",
    "aten.relu", "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.batch_norm", "aten.dropout",
    "kernels.rms_norm", "kernels.add_rms_norm", "kernels.add_layer_norm", "kernels.swiglu",
    "kernels.geglu", "kernels.gelu",
)  # fmt: skip

_SEVERAL = re.compile(r"return [^()]*(\([^()]*\)[^()]*)*,")  # a line that returns several values


class Names:
    """The names of one function's variables, each given out once.

    Args:
        graph: whose values are named.
        nodes: those that the function computes, in order.
    """

    def __init__(self, graph: Graph, nodes: Iterable[Node]) -> None:
        self.graph = graph
        self._taken = set(RESERVED)
        computed = [node for node in nodes if node.op not in IDENTITIES]
        self._roles = {**_consumed(graph, computed), **_returned(computed), **_assigned(computed)}

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
        if node.name in self._roles:
            return self._roles[node.name]
        if (function := called(node)) is not None:
            return re.split(r"[.:]", function[0])[-1].lower()
        if node.op == "aten.to.dtype":
            return f"{self.wish(self.graph[node.inputs[0]])}_{node.type.dtype}"
        if node.op in ("aten.t", "aten.transpose.int") and self._read(node).is_leaf:
            return f"{self.wish(self._read(node))}_transposed"
        if node.op == "getitem":
            several = _RESULTS.get(_word(self.graph[node.inputs[0]].op), ())
            at = node.args[1]
            return several[at] if isinstance(at, int) and at < len(several) else "part"
        word = _word(node.op)
        return _WORDS.get(word, word).strip("_")

    def _read(self, node: Node) -> Node:
        """The first value that a node reads, without the identities before it."""
        read = self.graph[node.inputs[0]]
        while read.op in IDENTITIES:
            read = self.graph[read.inputs[0]]
        return read


def _word(op: str) -> str:
    """The operator's own name, "add" of "aten.add.Tensor"."""
    return op.split(".")[1] if "." in op else op


def identifier(wish: str) -> str:
    """A name like `wish` that Python takes and that reads in one way only: letters of ASCII."""
    name = re.sub(r"\W", "_", wish, flags=re.ASCII)[:_LONGEST]
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"v_{name}"


def _assigned(nodes: list[Node]) -> dict[str, str]:
    """The last node of a line `name = ...` of the user's code -> that name."""
    names: dict[str, str] = {}
    for node, after in zip_longest(nodes, nodes[1:]):
        match = re.match(r"([A-Za-z_]\w*)\s*[-+*/]?=(?!=)", node.source.text)
        if match and (after is None or _line(after) != _line(node)):
            names[node.name] = match[1]
    return names


def _line(node: Node) -> tuple[str, int, str]:
    """The line of the user's code; several modules may stand in one."""
    return node.source.file, node.source.line, node.source.text


def _returned(nodes: list[Node]) -> dict[str, str]:
    """The last node that a module computes -> the module's name, as `self.norm(x)` has it."""
    names: dict[str, str] = {}
    for node, after in zip_longest(nodes, nodes[1:]):
        path = node.source.module
        name = path.rpartition(".")[2]
        outside = after is None or not f"{after.source.module}.".startswith(f"{path}.")
        if outside and name.isidentifier() and not _SEVERAL.match(node.source.text):
            names[node.name] = name
    return names


def _buffer(graph: Graph, name: str) -> str:
    """The last name of a buffer, of which `name` may be a view."""
    node = graph[name]
    while not node.is_leaf:
        node = graph[node.inputs[0]]
    return node.target.rpartition(".")[2]


def _consumed(graph: Graph, nodes: list[Node]) -> dict[str, str]:
    """A value that one module alone reads, or a buffer -> "down_proj_input", "new_running_mean"."""
    readers: dict[str, set[str]] = {}
    for reader in nodes:
        first = next(iter(reader.inputs), "")
        while first and graph[first].op in IDENTITIES:
            first = graph[first].inputs[0]
        name = reader.source.module.rpartition(".")[2]
        role = f"{name}_input" if reader.op in _NAMED_AFTER_MODULE and name.isidentifier() else ""
        if reader.op == WRITE:
            role, first = f"new_{_buffer(graph, first)}", reader.inputs[-1]
        for value in reader.inputs:
            while graph[value].op in IDENTITIES:
                value = graph[value].inputs[0]
            readers.setdefault(value, set()).add(role if value == first else "")
    return {
        value: next(iter(roles))
        for value, roles in readers.items()
        if len(roles) == 1 and "" not in roles
    }

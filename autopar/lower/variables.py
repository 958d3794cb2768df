"""Names variables so that a reader of the emitted program recognises the model."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest

from autopar.ir.graph import WRITE, Graph, Node
from autopar.operators.branches import ASSUME
from autopar.operators.own_functions import called

# Names with another meaning in a generated program.
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
    "keeping",
    "repeatable",
)
# Operators that set a layout and compute nothing.
IDENTITIES = ("autopar.share", "autopar.shard")
_LONGEST = 60  # characters of a name
_OPERATOR_NAMES = {
    "scaled_dot_product_attention": "attention",
    "sink_attention": "attention",
    "cross_entropy_loss": "cross_entropy",
    "sum": "total",
    "pow": "power",
}
# Views and reshaping copies -> the suffix for the name of their input.
_VIEWS = {
    "reshape": "reshaped", "t": "transposed", "transpose": "transposed", "permute": "permuted",
    "unsqueeze": "unsqueezed", "squeeze": "squeezed", "expand": "expanded", "slice": "part",
    "select": "part", "flip": "flipped", "pad": "padded",
}  # fmt: skip
_SPLITS = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
# Operators with several results -> the names of these.
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

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\s*(?::[^=]+)?\s*[-+*/]?=(?!=)")  # a = ..., a += ...
_TARGETS = re.compile(r"([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)+)\s*=(?!=)")  # of a, b = ...
_SEVERAL = re.compile(r"return [^()]*(\([^()]*\)[^()]*)*,")  # a line that returns several values


class Names:
    """The names of one function's variables, each used once.

    Args:
        graph: the graph whose values are named.
        nodes: the nodes that the function computes, in order.
    """

    def __init__(self, graph: Graph, nodes: Iterable[Node]) -> None:
        self.graph = graph
        self._taken = set(RESERVED)
        computed = [node for node in nodes if node.op not in IDENTITIES]
        self._roles = {
            **_consumed(graph, computed),
            **_returned(graph, computed),
            **_unpacked(graph, computed),
            **_assigned(computed),
        }

    def take(self, name: str) -> None:
        """Reserves a name."""
        self._taken.add(name)

    def fresh(self, wish: str) -> str:
        """Returns an unused name similar to `wish`, and reserves it."""
        wish = identifier(wish)
        name, count = wish, 1
        while name in self._taken:
            count += 1
            name = f"{wish}_{count}"
        self._taken.add(name)
        return name

    def wish(self, node: Node) -> str:
        """Returns the name that a programmer would give a node's value."""
        if node.op == "received":  # named as in the stage that sends it
            assigned = _ASSIGNED.match(node.source.text)
            return assigned[1] if assigned else node.name
        if node.is_leaf:
            parts = [part for part in node.target.split(".") if not part.isdigit()]
            start = node.keyword("start")
            return "_".join(parts[-2:]) + (f"_{start}" if start is not None else "")
        if node.op in IDENTITIES or node.op == ASSUME:
            return self.wish(self.graph[node.inputs[0]])
        module = node.source.module.rpartition(".")[2]
        op = node.op
        if op == "getitem" and node.args[1] == 0:  # named after the kernel
            op = self.graph[node.inputs[0]].op
        if op in _NAMED_AFTER_MODULE and module.isidentifier():
            return module
        if node.name in self._roles:
            return self._roles[node.name]
        if (function := called(node)) is not None:
            return re.split(r"[.:]", function[0])[-1].lower()
        if node.op == "aten.to.dtype":
            return f"{self.wish(self.graph[node.inputs[0]])}_{node.type.dtype}"
        if (word := _base_name(node.op)) in _VIEWS and node.op.startswith("aten."):
            return f"{self.wish(self._viewed(node))}_{_VIEWS[word]}"
        if node.op == "getitem":
            several = _RESULTS.get(_base_name(self.graph[node.inputs[0]].op), ())
            at = node.args[1]
            if isinstance(at, int) and at < len(several):
                return several[at]
            return f"{self.wish(self._viewed(node))}_part"
        return _OPERATOR_NAMES.get(word, word).strip("_")

    def _viewed(self, node: Node) -> Node:
        """Returns the value that a node is a view of, skipping views without a name."""
        read = self.graph[node.inputs[0]]
        unnamed = read.name not in self._roles and not read.is_leaf
        if read.op in IDENTITIES or (unnamed and _base_name(read.op) in (*_VIEWS, *_SPLITS)):
            return self._viewed(read)
        return read


def _base_name(op: str) -> str:
    """Returns the operator's base name, "add" for "aten.add.Tensor"."""
    return op.split(".")[1] if "." in op else op


def identifier(wish: str) -> str:
    """Returns a valid Python identifier similar to `wish`, in ASCII."""
    name = re.sub(r"\W", "_", wish, flags=re.ASCII)[:_LONGEST]
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"v_{name}"


def _assigned(nodes: list[Node]) -> dict[str, str]:
    """Maps the last node of a user's line `name = ...` to that name.

    In `x = a * b + self.act(c)`, the product `a * b` is computed before the module, and is not `x`.
    """
    names: dict[str, str] = {}
    for place, node in enumerate(nodes):
        match = _ASSIGNED.match(node.source.text)
        if match and not _goes_on(node, nodes[place + 1 :]):
            names[node.name] = match[1]
    return names


def _goes_on(node: Node, rest: Iterable[Node]) -> bool:
    """Returns whether more of a node's line is computed later, here or in a module it calls."""
    for after in rest:
        if _line(after) == _line(node):
            return True
        inside = f"{node.source.module}." if node.source.module else ""
        if not after.source.module.startswith(inside) or after.source.module == node.source.module:
            return False
    return False


def _unpacked(graph: Graph, nodes: list[Node]) -> dict[str, str]:
    """Maps the results of a user's line `a, b = ...` to these names, if their numbers agree."""
    names: dict[str, str] = {}
    for _, line in groupby(nodes, _line):
        group = list(line)
        targets = _TARGETS.match(group[0].source.text)
        if targets is None:
            continue
        own = {node.name for node in group}
        read = [node.name for node in group if not own.issuperset(_readers(graph, node.name))]
        wanted = [target.strip() for target in targets[1].split(",")]
        if len(read) == len(wanted):
            names |= dict(zip(read, wanted, strict=True))
    return names


def _readers(graph: Graph, name: str) -> Iterator[str]:
    """Yields the operators that read a value; for a share, those that read the shared value."""
    for user in graph.users[name]:
        if graph[user].op in IDENTITIES:
            yield from _readers(graph, user)
        else:
            yield user


def _line(node: Node) -> tuple[str, int, str]:
    """Returns the line of the user's code; one line may call several modules."""
    return node.source.file, node.source.line, node.source.text


def _returned(graph: Graph, nodes: list[Node]) -> dict[str, str]:
    """Maps the last value of a module that is read outside of it to the module's name."""
    names: dict[str, str] = {}
    modules = {node.name: f"{node.source.module}." for node in nodes}
    for place, (node, after) in enumerate(zip_longest(nodes, nodes[1:])):
        path = f"{node.source.module}."
        name = node.source.module.rpartition(".")[2]
        if not name.isidentifier() or (after and f"{after.source.module}.".startswith(path)):
            continue
        for last in reversed(nodes[: place + 1]):
            if not modules[last.name].startswith(path):
                break
            readers = [*_readers(graph, last.name)]
            inside = readers and all(modules.get(r, "").startswith(path) for r in readers)
            if last.op != WRITE and not inside:
                if not _SEVERAL.match(last.source.text):
                    names[last.name] = name
                break
    return names


def _buffer(graph: Graph, name: str) -> str:
    """Returns the last part of a buffer's name, given the buffer or a view of it."""
    node = graph[name]
    while not node.is_leaf:
        node = graph[node.inputs[0]]
    return node.target.rpartition(".")[2]


def _consumed(graph: Graph, nodes: list[Node]) -> dict[str, str]:
    """Names a value after its only reader: "down_proj_input", or a buffer's "new_running_mean"."""
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

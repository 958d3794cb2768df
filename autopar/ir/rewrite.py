"""Tools for passes: one walk over a graph in execution order, then removal of dead code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from autopar.ir.graph import EXTEND, WRITE, Arg, Graph, Node, Ref
from autopar.ir.tensor import TensorType


class Editor:
    """The graph that a walk has written so far."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: dict[str, Node] = {}
        self._renamed: dict[str, str] = {}
        self.fresh = Names(node.name for node in graph.nodes)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def resolve(self, name: str) -> str:
        """Returns the name of the value that now replaces the original value `name`."""
        return self._renamed.get(name, name)

    def new(self, hint: str, op: str, args: tuple[Arg, ...], kind: TensorType, like: Node) -> Ref:
        """Appends an operator with one result, named after `hint`, with the source of `like`."""
        node = Node(self.fresh(hint), op, args, (), (kind,), like.source)
        flows = kind.floating and any(self.nodes[name].requires_grad for name in node.inputs)
        node = replace(node, requires_grad=flows)
        self.nodes[node.name] = node
        return Ref(node.name)

    def put(self, node: Node) -> None:
        """Appends `node` under its own name."""
        self.nodes[node.name] = node

    def substitute(self, name: str, value: str) -> None:
        """Makes later readers of `name` read `value`."""
        self._renamed[name] = value


class Names:
    """Generates unused names: "x", "x_1", "x_2", ..."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def __call__(self, hint: str) -> str:
        """Returns an unused name, `hint` itself if possible."""
        name = hint
        while name in self._taken:
            self._counts[hint] = self._counts.get(hint, 0) + 1
            name = f"{hint}_{self._counts[hint]}"
        self._taken.add(name)
        return name


Rule = Callable[[Node, Editor], Node | Ref | None]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """Returns `graph` with `rule` applied to every node in execution order, dead operators dropped.

    The rule gets a node that already reads the rewritten values, and may append operators to the
    editor. It returns None to keep the node, another node to replace it, or a reference to the
    value that replaces its result. Saved tensors and repeats are dropped; `prepare` determines both
    again at its end.
    """
    editor = Editor(graph)
    for node in graph.nodes:
        if any(editor.resolve(name) != name for name in node.inputs):
            node = node.map_refs(lambda name: Ref(editor.resolve(name)))
        if node.alias is not None or node.saved or node.saved_types:
            node = replace(node, alias=None, saved=(), saved_types=())
        replacement = rule(node, editor)
        if isinstance(replacement, Ref):
            editor.substitute(node.name, replacement.name)
        else:
            editor.put(node if replacement is None else replacement)
    nodes = sorted(editor.nodes.values(), key=lambda node: not node.is_leaf)
    outputs = tuple((user, editor.resolve(name)) for user, name in graph.outputs)
    loss = None if graph.loss is None else editor.resolve(graph.loss)
    return eliminate_dead(Graph(graph.name, tuple(nodes), outputs, loss, execution=graph.execution))


def eliminate_dead(graph: Graph) -> Graph:
    """Returns `graph` without operators that reach no output; leaves and writes of buffers stay.

    Unread parameters and buffers stay because they belong to the model's state, unread inputs
    because they belong to its signature.
    """
    live = {name for _, name in graph.outputs} | {graph.loss}
    for node in reversed(graph.nodes):
        if node.name in live or writes(node):
            live.add(node.name)
            live.update(node.inputs)
    nodes = tuple(node for node in graph.nodes if node.is_leaf or node.name in live)
    if len(nodes) == len(graph.nodes):
        return graph
    return replace(graph, nodes=nodes, repeats=())


def writes(node: Node) -> tuple[str, ...]:
    """Returns the buffer that an operator writes, at the end of a step or into a cache."""
    return node.inputs[:1] if node.op in (WRITE, EXTEND) else ()


def argument(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    """Returns the argument at `position`, else the keyword `name`, else `default`."""
    return node.args[position] if position < len(node.args) else node.keyword(name, default)


def number(value: Arg, default: int) -> int:
    """Returns `value` if it is an integer, else `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def dimension(value: Arg, rank: int, default: int = 0) -> int:
    """Returns a dimension argument counted from the front."""
    return number(value, default) % max(rank, 1)

"""Templates: a few lines of a graph, with names for the parts that vary.

    %h = activation(%x) : ()
    %y = aten.mul.Tensor(%h, SCALE) : ()

matches any y computed in this way. A reference that no line defines matches any value, and a name
in capitals matches any argument; equal names must match equal values. An operator without a
namespace matches one of several operators. Casts of integers are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.graph_text import parse_graph


class Pattern:
    """A template, and the operators that its names without a namespace match.

    Args:
        text: its lines, as in a graph; the last one is matched against a node.
        alike: operators that each name without a namespace stands for.
    """

    def __init__(self, text: str, alike: Mapping[str, Sequence[str]]) -> None:
        self.nodes = {node.name: node for node in parse_graph(f"graph ''\n{text}").nodes}
        self.end = list(self.nodes)[-1]
        self.alike = alike

    def match(
        self, node: Node, graph: Graph, at: str = "", known: Mapping[str, Arg] | None = None
    ) -> dict[str, Arg] | None:
        """Returns bindings of names (values as Refs) if `node` of `graph` matches, else None.

        Args:
            node: a node.
            graph: its graph.
            at: the line that it is matched against, by default the last one.
            known: bindings that must hold as well.
        """
        bound = dict(known or {})
        return bound if self._value(at or self.end, node.name, graph, bound) else None

    def _value(self, wanted: str, name: str, graph: Graph, bound: dict[str, Arg]) -> bool:
        if wanted in bound:
            return bound[wanted] == Ref(name)
        pattern, node = self.nodes.get(wanted), graph[name]
        if pattern is None:
            bound[wanted] = Ref(name)
            return True
        while node.op == "aten.to.dtype" and not graph[node.inputs[0]].type.floating:
            node = graph[node.inputs[0]]
        if node.op not in self.alike.get(pattern.op, (pattern.op,)):
            return False
        bound[wanted] = Ref(node.name)
        given = dict(node.kwargs)
        return self._args(pattern.args, node.args, graph, bound) and all(
            key in given and self._arg(value, given[key], graph, bound)
            for key, value in pattern.kwargs
        )

    def _args(
        self, wanted: tuple[Arg, ...], args: tuple[Arg, ...], graph: Graph, bound: dict[str, Arg]
    ) -> bool:
        return len(wanted) == len(args) and all(
            self._arg(one, other, graph, bound) for one, other in zip(wanted, args, strict=True)
        )

    def _arg(self, wanted: Arg, arg: Arg, graph: Graph, bound: dict[str, Arg]) -> bool:
        if isinstance(wanted, Ref):
            return isinstance(arg, Ref) and self._value(wanted.name, arg.name, graph, bound)
        if isinstance(wanted, Name) and wanted.text.isupper():
            return bool(bound.setdefault(wanted.text, arg) == arg)
        if isinstance(wanted, tuple):
            return isinstance(arg, tuple) and self._args(wanted, arg, graph, bound)
        return wanted == arg

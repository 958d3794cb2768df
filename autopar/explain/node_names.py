"""The user's names for nodes of the folded graph, with "*" for the number of a block."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from autopar.ir.graph import Graph, Node


def parameter_name(graph: Graph, node: Node) -> str:
    """Returns the user's name of a leaf of the folded graph, "*" for the number of its block."""
    return _pattern(_label(node), _label(_counterpart(graph, node)))


def module_pattern(graph: Graph, node: Node) -> str:
    """Returns the module of a node of the folded graph, "*" for the number of its block."""
    return _pattern(node.source.module, _counterpart(graph, node).source.module)


def _counterpart(graph: Graph, node: Node) -> Node:
    """Returns the second block's counterpart of a first block's node; other nodes unchanged."""
    for repeat in graph.repeats:
        if node.name in repeat.iterations[0]:
            return graph[repeat.iterations[1][repeat.iterations[0].index(node.name)]]
    return node


def _label(node: Node) -> str:
    """Returns a parameter's name, with the slice if it is one: "c_attn.weight[:, 0:768]"."""
    dim, start, length = (node.keyword(name) for name in ("dim", "start", "length"))
    if isinstance(dim, int) and isinstance(start, int) and isinstance(length, int):
        return f"{node.target}[{':, ' * dim}{start}:{start + length}]"
    return node.target


def _pattern(name: str, other: str) -> str:
    """Replaces the part in which two names differ: "h.0.mlp", "h.1.mlp" -> "h.*.mlp"."""
    parts, others = (re.split(r"(\W)", text) for text in (name, other))
    if len(parts) != len(others):
        return name
    return "".join(a if a == b else "*" for a, b in zip(parts, others, strict=True))


def block_modules(graph: Graph, number: int) -> dict[str, str]:
    """Returns the module of each node of a run's first block, "*" for the number of the block."""
    first, second = graph.repeats[number].iterations[:2]
    return {
        a: _pattern(graph[a].source.module, graph[b].source.module)
        for a, b in zip(first, second, strict=True)
        if graph[a].source.module and graph[a].op != "autopar.share"
    }


def common(modules: Iterable[str]) -> str:
    """Returns the longest common prefix of module paths, in whole components."""
    prefix: list[str] | None = None
    for module in modules:
        parts = module.split(".")
        pairs = zip(parts if prefix is None else prefix, parts, strict=False)
        prefix = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join(prefix or []) or "a repeated block"

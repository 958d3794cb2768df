"""Names of the folded graph as the user knows them, "*" for the number of a block."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from autopar.ir.graph import Graph, Node


def parameter_name(graph: Graph, node: Node) -> str:
    """A leaf of the folded graph as the user knows it, "*" for the number of its block."""
    return _pattern(_label(node), _label(_counterpart(graph, node)))


def module_pattern(graph: Graph, node: Node) -> str:
    """The module of a node of the folded graph, "*" for the number of its block."""
    return _pattern(node.source.module, _counterpart(graph, node).source.module)


def _counterpart(graph: Graph, node: Node) -> Node:
    """What a node of the first block of a run is in the second; itself outside of runs."""
    for repeat in graph.repeats:
        if node.name in repeat.iterations[0]:
            return graph[repeat.iterations[1][repeat.iterations[0].index(node.name)]]
    return node


def _label(node: Node) -> str:
    """A parameter's name, with where it is cut: "c_attn.weight[:, 0:768]"."""
    dim, start, length = (node.keyword(word) for word in ("dim", "start", "length"))
    if isinstance(dim, int) and isinstance(start, int) and isinstance(length, int):
        return f"{node.target}[{':, ' * dim}{start}:{start + length}]"
    return node.target


def _pattern(name: str, other: str) -> str:
    """Two names of one kind as one: "h.0.mlp", "h.1.mlp" -> "h.*.mlp"."""
    words, others = (re.split(r"(\W)", text) for text in (name, other))
    if len(words) != len(others):
        return name
    return "".join(a if a == b else "*" for a, b in zip(words, others, strict=True))


def block_modules(graph: Graph, number: int) -> dict[str, str]:
    """Node of the first block of a run -> its module, with "*" for the block's number."""
    first, second = graph.repeats[number].iterations[:2]
    return {
        a: _pattern(graph[a].source.module, graph[b].source.module)
        for a, b in zip(first, second, strict=True)
        if graph[a].source.module and graph[a].op != "autopar.share"
    }


def common(modules: Iterable[str]) -> str:
    """The beginning that module paths share, in whole words."""
    found: list[str] | None = None
    for module in modules:
        words = module.split(".")
        pairs = zip(words if found is None else found, words, strict=False)
        found = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join(found or []) or "a repeated block"

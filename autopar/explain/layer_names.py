"""Names the layer of the model that a node belongs to: the module path up to its first number."""

from __future__ import annotations

import re
from collections import Counter

from autopar.ir.graph import Graph, Node, Repeat

OUTSIDE = "outside of modules"


def layers(graph: Graph) -> dict[str, str]:
    """Names the layer of each node of the folded graph.

    Returns:
        Node -> layer: "transformer.h.0-31 × 32" for nodes of repeated blocks, "layer1.0" for nodes
        in another numbered module, else the whole module, "transformer.wte".
    """
    names = {node.name: _layer(_module(node)) for node in graph.folded}
    for repeat in graph.repeats:
        names.update(dict.fromkeys(repeat.iterations[0], _blocks(graph, repeat)))
    return names


def _module(node: Node) -> str:
    """Returns the module that computes a node or owns a leaf."""
    return node.target.rpartition(".")[0] if node.is_leaf else node.source.module


def _layer(module: str) -> str:
    numbered = re.match(r"(?:.*?\.)??\d+(?=\.|$)", module)
    return (numbered[0] if numbered else module) or OUTSIDE


def _blocks(graph: Graph, repeat: Repeat) -> str:
    """Names the blocks of a run, with the numbers of the first and the last module.

    A block of a run may begin in the middle of a module; the numbers cover every module that the
    run overlaps.
    """
    ends: list[Counter[tuple[str, int]]] = []
    for iteration in (repeat.iterations[0], repeat.iterations[-1]):
        names = (_layer(_module(graph[name])) for name in iteration)
        split = (name.rpartition(".") for name in names)
        ends.append(Counter((path, int(last)) for path, _, last in split if last.isdecimal()))
    paths = Counter(path for path, _ in ends[0].elements())
    if not paths:
        return f"a repeated block × {repeat.count}"
    (path, _), *_ = paths.most_common(1)
    first, last = (sorted(number for name, number in end if name == path) for end in ends)
    if not last:
        return f"{path or 'blocks'} × {repeat.count}"
    numbers = f"{min(first)}-{max(last)}"
    return f"{path}.{numbers} × {repeat.count}" if path else f"{numbers} × {repeat.count}"

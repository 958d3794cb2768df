"""Writes rows into caches in place, instead of computing whole new caches.

A trace of `cache.index_copy_(2, positions, rows)` computes a new value of the buffer, which
`autopar.write` stores at the end of the step. A program that generates has no backward that reads
the old value. The rows are therefore written at once, which costs only as much as the rows.

The state of a recurrence is a new value for every token, which is stored at the end of the step.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.generation.cached_call import CACHES
from autopar.errors import CaptureError
from autopar.ir.graph import CACHE, EXTEND, WRITE, Graph, Node

_COPY = "aten.index_copy"


def extend_caches(graph: Graph) -> Graph:
    """Returns the graph of a `CachedCall` whose caches are marked as such and written in place.

    Raises:
        CaptureError: a cache is extended twice, or read before it is extended.
    """
    caches = {leaf.name for leaf in graph.leaves("buffer") if leaf.target.startswith(CACHES)}
    extended = {node.inputs[0] for node in graph.nodes if node.op == _COPY} & caches
    nodes = []
    for node in graph.nodes:
        if node.name in caches:
            nodes.append(replace(node, kwargs=((CACHE, True),)))
        elif node.op == _COPY and node.inputs[0] in caches:
            nodes.append(replace(node, op=EXTEND))
        elif node.op == WRITE and node.inputs[0] in caches:
            if node.inputs[0] not in extended:
                nodes.append(replace(node, kwargs=((CACHE, True),)))
        else:
            nodes.append(node)
    for name in extended:
        readers = [node for node in nodes if name in node.inputs]
        if len(readers) > 1:
            raise _misused(graph[name], readers)
    return replace(graph, nodes=tuple(nodes))


def _misused(cache: Node, readers: list[Node]) -> CaptureError:
    """Returns the error for a cache that is also read before it is extended."""
    other = next((node for node in readers if node.op != EXTEND), readers[-1])
    return CaptureError(
        f"the cache {cache.target!r} is extended and read by two operators",
        where=str(other.source),
        why="an attention layer extends its keys and values once in a call, and reads the result",
        todo="call past_key_values.update(keys, values, layer) once in every layer, and attend to "
        "what it returns",
    )

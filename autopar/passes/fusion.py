"""Replaces operators by fused kernels where patterns match.

A pattern does not cross the boundary of a repeated block, so that all blocks remain equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import GraphError
from autopar.ir.fusion.match import find
from autopar.ir.fusion.pattern import Match, Pattern, Writer
from autopar.ir.fusion.patterns import patterns
from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Names, eliminate_dead
from autopar.passes.repeats import find_repeats

Home = tuple[int, int] | None  # run and block
Known = dict[tuple[str, tuple[Arg, ...]], Ref]


def _matches(
    graph: Graph, chosen: tuple[str, ...], home: Mapping[str, tuple[int, int]]
) -> tuple[tuple[Pattern, Match], ...]:
    """Returns non-overlapping matches of the `chosen` patterns, in execution order."""
    wanted = [pattern for pattern in patterns() if pattern.name in chosen]
    matches: list[tuple[Pattern, Match]] = []
    taken: set[str] = set()
    # From the end, so that parts of a longer match are not matched by themselves.
    for node in reversed(graph.nodes):
        for pattern in wanted:
            match = find(pattern, graph, node)
            if match is None or taken & match.inside:
                continue
            if len({home.get(name) for name in match.inside}) == 1:
                matches.append((pattern, match))
                taken |= match.inside
                break
    return tuple(reversed(matches))


def fuse(graph: Graph, chosen: tuple[str, ...]) -> Graph:
    """Returns `graph` with kernels in place of the patterns called `chosen`."""
    home = _blocks(graph)
    matches = _matches(graph, chosen, home)
    if not matches:
        return graph
    fresh = Names(node.name for node in graph.nodes)
    nodes = {node.name: node for node in graph.nodes}
    known = defaultdict[Home, Known](dict)
    for pattern, match in matches:
        writer = Writer(match.found, fresh, known[home.get(match.found.name)])
        pattern.replace(match, writer)
        for node in writer.nodes:
            nodes[node.name] = node
    return eliminate_dead(replace(graph, nodes=_in_order(graph, nodes), repeats=()))


def _in_order(graph: Graph, nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """Returns the nodes in their previous order, except that each comes after its operands."""
    placed: dict[str, Node] = {}

    def place(name: str) -> None:
        stack = [name]
        while stack:
            if len(stack) > len(nodes):
                raise GraphError(
                    "kernels would read one another's results",
                    where=str(nodes[name].source),
                    todo="compile with fuse=False",
                )
            node = nodes[stack[-1]]
            missing = [read for read in dict.fromkeys(node.inputs) if read not in placed]
            if missing:
                stack += reversed(missing)
            else:
                placed.setdefault(stack.pop(), node)

    for node in graph.nodes:
        place(node.name)
    return tuple(placed.values())


def _blocks(graph: Graph) -> dict[str, tuple[int, int]]:
    """Returns the run and the block of each node that is in one."""
    return {
        name: (run, number)
        for run, repeat in enumerate(find_repeats(graph).repeats)
        for number, iteration in enumerate(repeat.iterations)
        for name in iteration
    }

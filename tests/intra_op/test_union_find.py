"""Union-find against the connected components of random graphs."""

from __future__ import annotations

import random

import networkx

from autopar.intra_op.union_find import UnionFind


def test_classes_are_connected_components() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        edges = [(draw.randrange(40), draw.randrange(40)) for _ in range(draw.randrange(50))]
        graph = networkx.Graph()
        graph.add_nodes_from(range(40))
        graph.add_edges_from(edges)
        classes = UnionFind[int]()
        for one, other in edges:
            classes.union(one, other)
        for component in networkx.connected_components(graph):
            assert {classes[value] for value in component} <= component
            assert len({classes[value] for value in component}) == 1

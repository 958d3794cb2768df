"""Finds the values and parameters that stages share, in their graphs."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline_step import Edge, Wiring
from autopar.lower.parameter_keys import leaf_key


def wiring_of(graphs: Sequence[Graph], meshes: Sequence[Mesh]) -> Wiring:
    """Returns the values that stages send one another, and the trained parameters that they share.

    Args:
        graphs: graphs of the stages, from `stage_graphs`.
        meshes: meshes of the stages.
    """
    origins = {name: n for n, graph in reversed([*enumerate(graphs)]) for name, _ in graph.outputs}
    gradients: dict[tuple[int, int], bool] = {}
    for reader, graph in enumerate(graphs):
        for leaf in graph.leaves("received"):
            edge = origins[leaf.target], reader
            gradients[edge] = gradients.get(edge, False) or leaf.requires_grad
    trained = [{leaf_key(n) for n in g.leaves("param") if n.requires_grad} for g in graphs]
    shared = [
        tuple(sorted(name for name in own if sum(name in other for other in trained) > 1))
        for own in trained
    ]
    edges = (Edge(maker, reader, back) for (maker, reader), back in sorted(gradients.items()))
    axes = (tuple(axis.name for axis in mesh.axes if axis.size > 1) for mesh in meshes)
    return Wiring(tuple(edges), tuple(shared), tuple(axes))

"""Parameters that another program stores already, for the plan of a further program over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.storage import Storage
from autopar.lower.parameter_keys import leaf_key
from autopar.stage_plan import StagePlan


def storages_of(graph: Graph, plan: StagePlan) -> dict[str, Storage]:
    """Returns the storage of every parameter by its key in the program.

    Args:
        graph: prepared.
        plan: for it.
    """
    return {
        leaf_key(leaf): plan.storage(
            graph.template[leaf.name], graph.template[graph.users[leaf.name][0]]
        )
        for leaf in graph.leaves("param")
        if graph.users[leaf.name]
    }


def with_unequal_blocks(graph: Graph, stored: Mapping[str, Storage]) -> Graph:
    """Returns the graph without runs of equal blocks whose parameters are stored unequally.

    Blocks that differ in training alone, as by the rate of a dropout, may be stored so.
    """
    leaves = {leaf.name: stored.get(leaf_key(leaf)) for leaf in graph.leaves("param")}
    equal = tuple(
        repeat
        for repeat in graph.repeats
        if len({tuple(leaves.get(name) for name in block) for block in repeat.iterations}) == 1
    )
    return graph if equal == graph.repeats else replace(graph, repeats=equal)

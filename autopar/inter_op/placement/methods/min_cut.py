"""Minimum cut: halves of little traffic and equal work, by networkx, halved again for more devices.

Kernighan and Lin, "An Efficient Heuristic Procedure for Partitioning Graphs" (1970), as METIS-based
placements use it. The parts go to devices by falling work and speed; precedence is not seen.
"""

from __future__ import annotations

from typing import Any

from autopar.errors import InfeasibleError
from autopar.inter_op.placement.placement_problem import (
    Placed,
    PlacementProblem,
    simulate_placement,
)


def place(problem: PlacementProblem, *, seed: int = 0, **_: Any) -> Placed:
    """Returns the placement of the parts; raises InfeasibleError if it does not fit."""
    parts = _parts(problem, list(range(len(problem.tasks))), problem.devices, seed)
    parts.sort(key=lambda part: -sum(sum(problem.tasks[v].seconds) for v in part))
    total = [sum(task.seconds[d] for task in problem.tasks) for d in range(problem.devices)]
    fastest = sorted(range(problem.devices), key=total.__getitem__)
    devices = [0] * len(problem.tasks)
    for part, device in zip(parts, fastest, strict=True):
        for v in part:
            devices[v] = device
    if not problem.fits(devices):
        raise InfeasibleError(
            "the parts of the minimum cut do not fit",
            where=f"placement problem {problem.name!r}",
            why="it balances the number of tasks, not their memory",
            todo="use another method",
        )
    return simulate_placement(problem, devices)


def _parts(problem: PlacementProblem, nodes: list[int], count: int, seed: int) -> list[list[int]]:
    import networkx

    if count == 1 or len(nodes) < 2:
        return [nodes, *([] for _ in range(count - 1))]
    graph = networkx.Graph()
    graph.add_nodes_from(nodes)
    for t in problem.transfers:
        if graph.has_node(t.a) and graph.has_node(t.b):
            before = graph.get_edge_data(t.a, t.b, {"weight": 0.0})["weight"]
            graph.add_edge(t.a, t.b, weight=before + t.nbytes)
    bisected = networkx.algorithms.community.kernighan_lin_bisection
    halves = bisected(graph, weight="weight", seed=seed)
    less, more = sorted(map(sorted, halves), key=len)
    first = _parts(problem, less, count // 2, seed)
    return [*first, *_parts(problem, more, count - count // 2, seed)]

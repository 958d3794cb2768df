"""Earliest task first (ETF): runs the ready task that can start first, on the device where it can.

Hwang, Chow, Anger and Lee, "Scheduling Precedence Graphs in Systems with Interprocessor
Communication Times" (SIAM J. Comput. 18, 1989). Ties go to the higher rank, then to the faster
device.
"""

from __future__ import annotations

from typing import Any

from autopar.inter_op.placement.methods._greedy_start import Partial
from autopar.inter_op.placement.placement_problem import (
    Placed,
    PlacementProblem,
    simulate_placement,
)


def place(problem: PlacementProblem, **options: Any) -> Placed:
    """Returns ETF's placement; raises InfeasibleError where a task finds no device with room."""
    partial = Partial(problem)
    waiting = [len(into) for into in problem.inputs]
    ready = [v for v, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        _, _, _, v, device = min(
            (partial.start(v, d), -problem.ranks[v], partial.seconds(v, d), v, d)
            for v in ready
            for d in partial.allowed(v)
        )
        partial.put(v, device)
        order.append(v)
        ready.remove(v)
        for t in problem.outputs[v]:
            waiting[t.b] -= 1
            ready += [t.b] if not waiting[t.b] else []
    placements = (
        simulate_placement(problem, partial.devices, order),
        simulate_placement(problem, partial.devices),
    )
    return min(placements, key=lambda placed: placed.seconds)

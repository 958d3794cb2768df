"""HEFT: tasks by falling upward rank, each to the device on which it ends first.

Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task Scheduling for
Heterogeneous Computing" (IEEE TPDS 13, 2002), without insertion into earlier gaps, which
`simulate_placement` does not use.
"""

from __future__ import annotations

from typing import Any

from autopar.inter_op.placement.methods._greedy_start import Partial
from autopar.inter_op.placement.placement_problem import (
    Placed,
    PlacementProblem,
    simulate_placement,
)


def place(problem: PlacementProblem, **_: Any) -> Placed:
    """Returns HEFT's placement; raises InfeasibleError where a task finds no device with room."""
    partial = Partial(problem)
    for v in problem.by_rank:
        device = min(partial.allowed(v), key=lambda d: partial.start(v, d) + partial.seconds(v, d))
        partial.put(v, device)
    return simulate_placement(problem, partial.devices)

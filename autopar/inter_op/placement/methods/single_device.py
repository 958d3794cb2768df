"""Places all tasks on the single device that is fastest for them."""

from __future__ import annotations

from typing import Any

from autopar.errors import InfeasibleError
from autopar.inter_op.placement.placement_problem import (
    Placed,
    PlacementProblem,
    simulate_placement,
)


def place(problem: PlacementProblem, **_: Any) -> Placed:
    """Returns the fastest placement on a single device; raises InfeasibleError if none fits."""
    every = [(device,) * len(problem.tasks) for device in range(problem.devices)]
    fitting = [devices for devices in every if problem.fits(devices)]
    if not fitting:
        raise InfeasibleError(
            "no single device holds all tasks",
            where=f"placement problem {problem.name!r}",
            todo="use another method",
        )
    return min(
        (simulate_placement(problem, devices) for devices in fitting),
        key=lambda placed: placed.seconds,
    )

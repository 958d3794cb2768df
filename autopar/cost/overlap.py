"""How much of a collective is hidden behind steps that do not wait for it."""

from __future__ import annotations

import math

from autopar.errors import CostError


def overlap_ratio(steps: int, step_seconds: float, collective_seconds: float) -> float:
    """The share of an asynchronous collective that fits beside so many local steps, 0 to 1.

    CO2 (arXiv:2401.16265, sec. 3) starts the all_reduce of its outer loop and goes on for `steps`
    steps before it needs the result: min(1, steps x step / all_reduce). What is left is waited for.

    Raises:
        CostError: no step, or seconds that are not finite and positive (a step's may be 0).
    """
    good = math.isfinite(step_seconds) and math.isfinite(collective_seconds)
    if steps < 1 or not good or step_seconds < 0 or collective_seconds <= 0:
        raise CostError(
            f"{steps} steps of {step_seconds} seconds beside {collective_seconds} seconds do not "
            "have an overlap",
            why="at least one step is needed, and times that are finite and positive",
        )
    return min(1.0, steps * step_seconds / collective_seconds)

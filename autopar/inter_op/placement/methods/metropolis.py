"""Markov chain Monte Carlo over placements, as FlexFlow's search applied to devices.

A random task moves to a random device, two tasks exchange their devices, or two neighbours in the
order are swapped; the simulated time decides, by Metropolis' rule at a falling temperature. The
walk starts from the best placement of list scheduling that fits.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

from autopar.errors import InfeasibleError
from autopar.inter_op.placement.methods import earliest_start, list_scheduling, single_device
from autopar.inter_op.placement.placement_problem import (
    Placed,
    PlacementProblem,
    simulate_placement,
)

HOT, COLD = 3e-2, 1e-4  # first and last temperature, relative to the seconds at the start
MOVES = 20_000


def place(
    problem: PlacementProblem, *, time_limit: float = 60.0, seed: int = 0, **_: Any
) -> Placed:
    """Returns the best placement met; raises InfeasibleError if no start fits."""
    begun, draw = time.perf_counter(), random.Random(seed)
    best = now = _start(problem)
    order, waits = problem.by_rank, {(t.a, t.b) for t in problem.transfers}
    for move in range(MOVES if len(order) > 1 else 0):
        if time.perf_counter() - begun > time_limit:
            break
        heat = best.seconds * HOT * (COLD / HOT) ** (move / MOVES)
        devices, changed = list(now.devices), list(order)
        v, w, k = draw.randrange(len(order)), draw.randrange(len(order)), draw.randrange(3)
        if k == 0:
            devices[v] = draw.randrange(problem.devices)
        elif k == 1:
            devices[v], devices[w] = devices[w], devices[v]
        elif (changed[v - 1], changed[v]) not in waits and v:
            changed[v - 1], changed[v] = changed[v], changed[v - 1]
        if not problem.fits(devices):
            continue
        tried = simulate_placement(problem, devices, changed)
        if tried.seconds <= now.seconds - heat * math.log(1.0 - draw.random()):
            now, order = tried, changed
            best = min(best, now, key=lambda placed: placed.seconds)
    return best


def _start(problem: PlacementProblem) -> Placed:
    starts: list[Placed] = []
    for method in (list_scheduling, earliest_start, single_device):
        try:
            starts.append(method.place(problem))
        except InfeasibleError as error:
            last = error
    if not starts:
        raise last
    return min(starts, key=lambda placed: placed.seconds)

"""Device placement: methods against published lengths and the optima of all combinations."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from autopar.errors import InfeasibleError, ProblemError
from autopar.inter_op.placement.methods import methods, place
from autopar.inter_op.placement.placement_problem import (
    PlacementProblem,
    Task,
    Transfer,
    simulate_placement,
)

# The example of Topcuoglu, Hariri and Wu (2002): figure 1, seconds on three processors.
SECONDS = (
    (14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10), (13, 16, 9), (7, 15, 11),
    (5, 11, 14), (18, 12, 20), (21, 7, 16),
)  # fmt: skip
TRANSFERS = (
    (1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23),
    (4, 8, 27), (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13),
)  # fmt: skip


def published() -> PlacementProblem:
    return PlacementProblem(
        "HEFT",
        tuple(Task(f"n{k + 1}", seconds) for k, seconds in enumerate(SECONDS)),
        tuple(Transfer(a - 1, b - 1, nbytes) for a, b, nbytes in TRANSFERS),
        np.zeros((3, 3)),
        np.ones((3, 3)),
    )


def drawn(seed: int, count: int = 6) -> PlacementProblem:
    """A random graph on two unlike devices that cannot hold everything alone."""
    draw = random.Random(seed)
    tasks = [Task(f"t{k}", (draw.uniform(1, 5), draw.uniform(1, 5)), 1.0) for k in range(count)]
    ends = [(a, b) for a, b in itertools.combinations(range(count), 2) if draw.random() < 0.4]
    return PlacementProblem(
        f"drawn {seed}",
        tuple(tasks),
        tuple(Transfer(a, b, draw.uniform(0, 4)) for a, b in ends),
        np.array([[0.0, 0.2], [0.3, 0.0]]),
        np.array([[1.0, 2.0], [1.5, 1.0]]),
        (4.0, 4.0),
    )


def exhaustive(problem: PlacementProblem) -> float:
    """The shortest time over all devices and all orders, timed here anew."""
    count, best = len(problem.tasks), float("inf")
    for order in itertools.permutations(range(count)):
        if any(order.index(t.a) > order.index(t.b) for t in problem.transfers):
            continue
        for devices in itertools.product(range(2), repeat=count):
            if max(devices.count(0), devices.count(1)) > 4:
                continue
            free, ends = [0.0, 0.0], dict[int, float]()
            for v in order:
                d = devices[v]
                arrivals = [free[d]]
                for t in problem.transfers:
                    if t.b == v:
                        e = devices[t.a]
                        apart = problem.latency[e, d] + t.nbytes / problem.bandwidth[e, d]
                        arrivals.append(ends[t.a] + (apart if e != d else 0.0))
                ends[v] = free[d] = max(arrivals) + problem.tasks[v].seconds[d]
            best = min(best, max(ends.values()))
    return best


def test_list_scheduling_gives_the_published_length() -> None:
    assert place(published(), "list_scheduling").seconds == 80
    assert place(published(), "metropolis", seed=1, time_limit=math.inf).seconds <= 80


@pytest.mark.parametrize("seed", range(3))
def test_exact_placements_are_those_of_all_combinations(seed: int) -> None:
    problem = drawn(seed)
    best = exhaustive(problem)
    exact = place(problem, "exact_placement")
    assert exact.seconds == pytest.approx(best, rel=1e-6)
    assert problem.fits(exact.devices)
    assert place(problem, "metropolis", seed=seed, time_limit=math.inf).seconds == pytest.approx(
        best, rel=1e-6
    )
    for method in methods():
        try:
            placed = place(problem, method)
        except InfeasibleError:
            assert method in ("single_device", "min_cut")
            continue
        assert placed.seconds >= best * (1 - 1e-9)
        assert problem.fits(placed.devices)


def test_what_cannot_be_placed_is_refused() -> None:
    small = PlacementProblem(
        "p", (Task("t", (1.0,), 2.0),), (), np.zeros((1, 1)), np.ones((1, 1)), (1.0,)
    )
    for method in methods():
        with pytest.raises(InfeasibleError):
            place(small, method)
    tasks = Task("a", (1.0,)), Task("b", (1.0,))
    circle = Transfer(0, 1, 1.0), Transfer(1, 0, 1.0)
    with pytest.raises(ProblemError, match="wait for one another"):
        PlacementProblem("circle", tasks, circle, np.zeros((1, 1)), np.ones((1, 1)))
    with pytest.raises(ProblemError, match="before its inputs"):
        simulate_placement(drawn(0), [0, 0, 0, 0, 1, 1], [5, 4, 3, 2, 1, 0])
    with pytest.raises(ProblemError, match="no method"):
        place(small, "gradient")

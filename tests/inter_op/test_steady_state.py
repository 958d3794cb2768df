"""The period of schedules that do not flush, against every cycle and against long runs."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.inter_op.complete import complete, with_sends
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import schedule
from autopar.inter_op.steady_state import longest_cycle, steady
from tests.inter_op.test_asynchronous_rows import WAYS

Edges = dict[tuple[int, int], tuple[float, int]]  # (from, to) -> weight, distance


def every_cycle(nodes: int, edges: Edges) -> float:
    """The largest ratio of all cycles, one by one."""
    best = 0.0
    for count in range(1, nodes + 1):
        for cycle in itertools.permutations(range(nodes), count):
            pairs = list(itertools.pairwise((*cycle, cycle[0])))
            if all(pair in edges for pair in pairs):
                weight, distance = (sum(edges[pair][at] for pair in pairs) for at in (0, 1))
                best = max(best, weight / distance)
    return best


def test_the_longest_cycle_is_that_of_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(200):
        nodes = draw.randint(2, 6)
        edges: Edges = {}
        for pair in itertools.product(range(nodes), repeat=2):
            if draw.random() < 0.5:
                # Only edges to later nodes may have distance 0, so that every cycle has some.
                edges[pair] = draw.uniform(0, 9), draw.randint(int(pair[0] >= pair[1]), 3)
        rows = sorted((b, a, *edge) for (a, b), edge in edges.items())
        first = np.searchsorted([row[0] for row in rows], np.arange(nodes + 1))
        source, weight, distance = (np.array([row[at] for row in rows]) for at in (1, 2, 3))
        given = first, source.astype(np.int64), weight.astype(float), distance.astype(np.int64)
        assert longest_cycle(*given, 0.0, 1e-12) == pytest.approx(every_cycle(nodes, edges))


def check(name: str, options: dict[str, int], draw: random.Random, periods: int) -> None:
    """Compares the law of random stages and links with so many periods that are played."""
    made = schedule(name, draw.randint(1, 4), draw.choice((4, 6, 8)), **options)

    def some(most: float) -> float:
        return draw.choice((0.0, draw.uniform(0, most)))

    costs = [
        StageCost(
            *(draw.uniform(0.5, 2) for _ in range(3)), update=some(3),
            sums=some(60) if made.pending else 0.0,
        )
        for _ in range(made.stages)
    ]  # fmt: skip
    hops = [[some(8) for _ in range(made.stages - 1)] for _ in range(2)]
    step = complete(made)
    seconds, idle = steady(step, costs, *hops)
    assert steady(with_sends(made), costs, *hops) == pytest.approx((seconds, idle), rel=1e-9)
    few, many = (simulate(step.unrolled(count * periods), costs, *hops) for count in (1, 2))
    assert (many.seconds - few.seconds) / periods == pytest.approx(seconds, rel=1e-3)
    busy = (sum(many.busy) - sum(few.busy)) / periods / len(step.rows)
    assert idle == pytest.approx(1 - busy / seconds)


@pytest.mark.parametrize(("name", "options"), WAYS, ids=str)
def test_a_period_is_that_of_a_long_run(name: str, options: dict[str, int]) -> None:
    """Draws unequal stages, with links and late sums that may take longer than a period."""
    draw = random.Random(f"{name} {options}")
    for _ in range(4):
        check(name, options, draw, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), WAYS, ids=str)
def test_a_period_is_that_of_a_longer_run(name: str, options: dict[str, int]) -> None:
    draw = random.Random(f"more {name} {options}")
    for _ in range(40):
        check(name, options, draw, 240)


def test_late_sums_bound_a_period_however_far_replicas_may_be_ahead() -> None:
    """A link that is never idle; a rank waits for it only after a while."""
    for ahead in (2, 5):
        made = schedule("bounded_staleness", 2, 4, ahead=ahead)
        span = 3 * (4 + 2 - 1)
        for sums in (0.9 * span, 1.02 * span, 3 * span):
            seconds, idle = steady(complete(made), [StageCost(sums=sums), StageCost()])
            assert seconds == pytest.approx(max(span, sums))
            assert idle == pytest.approx(1 - 12 / seconds)

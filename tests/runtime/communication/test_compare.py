"""Times of races: calls that dropped out early, and sizes that were measured under other load."""

from __future__ import annotations

import random

import pytest

from autopar.cost.calibration import Exchange, Timing
from autopar.runtime.communication.compare import at_most, paired_medians


def test_a_call_that_dropped_out_of_a_calm_time_does_not_win() -> None:
    """The machine gets three times as slow after two turns, in which b took twice as long as a."""
    samples = {"a": [1.0, 1.0, 3.0, 3.0, 3.0], "b": [2.0, 2.0], "c": [1.5, 1.5, 4.5, 4.5, 4.5]}
    assert paired_medians(samples) == pytest.approx({"a": 3.0, "b": 6.0, "c": 4.5})
    # One sample that a disturbance made slow says nothing for those who dropped out.
    assert paired_medians({"a": [9.0, 1.0, 1.0], "b": [3.0]}) == pytest.approx({"a": 1, "b": 1.01})


def calls(seconds: dict[str, float]) -> list[Exchange]:
    return [Exchange("all_reduce", ("gpu",), 8.0, Timing(s, 0.1), by) for by, s in seconds.items()]


def test_sizes_are_in_order_and_the_fastest_of_each_remains() -> None:
    dice = random.Random(0)
    for _ in range(200):
        small, large = ({by: dice.uniform(1, 4) for by in "abcd"} for _ in range(2))
        after = {one.by: one.time.seconds for one in at_most(calls(small), large)}
        assert all(after[by] <= large[by] for by in large)
        fastest = min(small, key=lambda by: small[by])
        assert after[fastest] == min(after.values())
        assert {one.by: one.time.seconds for one in at_most(calls(small), {})} == small

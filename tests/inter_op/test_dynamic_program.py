"""Bounds of the dynamic program leave out only what cannot be chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.inter_op import dynamic_program as kernels

LAYERS, SIZES, DEVICES = 5, np.array([1, 2, 4]), 8
MOST = 2.5  # excludes some options


def program(seed: int) -> tuple[Any, ...]:
    """Arguments of `sums` up to its bounds, of a cluster of two parts."""
    draw = np.random.default_rng(seed)
    row = np.full((LAYERS, LAYERS), -1)
    pairs = np.triu_indices(LAYERS)
    row[pairs] = np.arange(len(pairs[0]))
    shape = (len(pairs[0]), len(SIZES), 2)
    length = (pairs[1] - pairs[0] + 1)[:, None, None]
    time = length * draw.uniform(1, 2, shape) / SIZES[:, None]
    fixed, each = length * draw.uniform(0, 2, shape), length * draw.uniform(0, 1, shape)
    count = draw.integers(0, 3, shape[:2])
    transfer = draw.uniform(0, 0.5, (LAYERS, len(SIZES), len(SIZES)))
    begin, end = np.array([0, 0, 4]), np.array([8, 4, 8])
    in_flight, memory = np.array([0.0, 1.0, 3.0, 2.0, 4.0, 5.0]), np.array([4.0, 6.0, 9.0])
    lowest = kernels.lowest_tops(row, time, count)
    after, before = kernels.devices_needed(lowest, SIZES, MOST)
    return (
        row, time, time, fixed, each, count, transfer, SIZES, begin, end, DEVICES, in_flight,
        memory, MOST, lowest, after, before,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_bounds_change_neither_the_least_sums_nor_their_stages(seed: int) -> None:
    """Compares with bounds of 0, which leave nothing out, for sums below a limit."""
    given = program(seed)
    if given[-2][0] > DEVICES:
        return
    bounds = kernels.sums_before(*given)
    nothing = np.zeros_like(bounds)
    whole, every = kernels.sums(*given, nothing, np.inf)
    first = bounds[-1, DEVICES - given[-1][-1]].min()
    assert first <= whole.min()
    for room in (np.inf, *(np.unique(whole[np.isfinite(whole)]) * 1.0001)):
        totals, ends = kernels.sums(*given, bounds, room)
        below = whole < room
        assert (totals[below] == whole[below]).all()
        assert (totals[~below] >= room).all()
        for stages in np.flatnonzero(below).tolist():
            found = kernels.trace(*given, ends, stages)
            assert (found == kernels.trace(*given, every, stages)).all()


def test_bounds_leave_out_most_of_a_search() -> None:
    """Beside the best pipeline nothing remains that is far from it."""
    remaining = []
    for seed in range(60):
        given = program(seed)
        if given[-2][0] > DEVICES:
            continue
        bounds = kernels.sums_before(*given)
        whole, every = kernels.sums(*given, np.zeros_like(bounds), np.inf)
        if np.isfinite(whole.min()):
            _, ends = kernels.sums(*given, bounds, whole.min() * 1.0001)
            remaining.append(np.isfinite(ends).sum() / np.isfinite(every).sum())
    assert len(remaining) > 10
    assert np.mean(remaining) < 0.5

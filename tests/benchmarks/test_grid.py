"""Tests that no plan of a Megatron-style grid is faster than the pipeline that the search finds."""

from __future__ import annotations

import pytest

from benchmarks.grid import Case, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", "H100: node=2, gpu=2", 8, seq=64, layers=4),
        Case("gpt2", "H100: node=2, gpu=4", 16, seq=512, layers=12),
    ],
    ids=lambda case: case.mesh,
)
def test_no_plan_of_the_grid_is_faster(case: Case) -> None:
    ours, *grid = rows(case)
    assert len(grid) > 4
    assert grid[0]["tried"] > grid[0]["fitting"] > len(grid) - 1
    assert [row["step_seconds"] for row in grid] == sorted(row["step_seconds"] for row in grid)
    assert ours["step_seconds"] <= grid[0]["step_seconds"] * (1 + 1e-6)

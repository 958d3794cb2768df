"""Tests the benchmark against hand-written torch: all programs train to the same losses."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.baselines import BASELINES
from benchmarks.exposure import without

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_baselines_train_alike() -> None:
    """Two steps of the tiniest model by every program; their losses agree."""
    name = "end_to_end_test"
    file = harness.RESULTS / f"{name}.csv"
    script = [sys.executable, "benchmarks/end_to_end.py", "--output", name, "--microbatches", "4"]
    sizes = ["--batch", "8", "--seq", "16", "--steps", "2", "--warmup", "1", "--layers", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*script, *sizes],
            cwd=ROOT, capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        with file.open(newline="") as table:
            rows = {row["program"]: row for row in csv.DictReader(table)}
    finally:
        file.unlink(missing_ok=True)
    assert set(rows) == {"autopar", "autopar pp", *BASELINES}, done.stdout
    for row in rows.values():
        assert float(row["step_ms"]) > 0
        assert 0 < float(row["mfu"]) < 1
        # The optimizer's first steps blow up rounding: an update is about as large as its sign.
        assert float(row["loss_difference"]) < 1e-5


def test_spans_that_are_not_covered() -> None:
    assert without([(0, 10), (12, 20)], [(2, 3), (9, 13), (19, 30)]) == [(0, 2), (3, 9), (13, 19)]
    assert without([(0, 1)], []) == [(0, 1)]
    assert without([(0, 1)], [(-1, 2)]) == []

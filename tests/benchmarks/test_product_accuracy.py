"""The ranges that plans print, against what was published, by the figures of the benchmark."""

from __future__ import annotations

import csv

from benchmarks.harness import RESULTS


def test_half_of_the_predicted_times_are_inside_their_printed_range() -> None:
    """Half of the held-out times are nearer, as cost/uncertainty.py promises."""
    with (RESULTS / "product_accuracy.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "predicted" and row["range"]]
    inside = sum(abs(float(row["error"])) <= float(row["range"]) for row in rows)
    assert len(rows) > 20
    assert inside >= len(rows) / 2

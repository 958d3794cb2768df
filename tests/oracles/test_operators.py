"""The documented counts of operators are those of the last run."""

from __future__ import annotations

from benchmarks.harness import ROOT
from benchmarks.operators import table


def test_the_page_of_results_shows_what_was_counted() -> None:
    assert table() in (ROOT / "docs" / "results" / "correctness.md").read_text(encoding="utf-8")

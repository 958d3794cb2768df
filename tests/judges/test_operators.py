"""The counts in the README are those of the last run."""

from __future__ import annotations

from benchmarks.harness import ROOT
from benchmarks.operators import table


def test_the_readme_shows_what_was_counted() -> None:
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8")

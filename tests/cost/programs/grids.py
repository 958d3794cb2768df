"""Grids of ranks that programs of collectives are written for in the tests."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.collectives import algorithms
from autopar.ir.chosen_algorithms import KINDS

ALGORITHMS = [(kind, name) for kind in KINDS for name in algorithms(kind)]


def grids(ranks: int, levels: int = 4) -> Iterator[tuple[int, ...]]:
    """Every grid of so many ranks, in up to so many levels of two or more."""
    yield (ranks,)
    for outer in range(2, ranks):
        if ranks % outer == 0 and levels > 1:
            for inner in grids(ranks // outer, levels - 1):
                yield (outer, *inner)

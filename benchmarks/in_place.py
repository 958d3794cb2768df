"""Compares every operator of ATen that writes with eager torch: `python -m benchmarks.in_place`.

Each operator is called on a buffer, on a view of one and on a local value. results/in_place.csv has
a row for each call, and the script prints the counts.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import write


def verdicts(counts: Counter[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """The rows; `counts` has the number of each (place, status)."""
    from tests.oracles.in_place import PLACES, judge, overloads

    for operator in overloads():
        for place in PLACES:
            verdict = judge(operator, place)
            counts[place, verdict.status] += 1
            yield asdict(verdict)


def main() -> None:
    """Judge them all."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # some operators are deprecated
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str]] = Counter()
    print(f"wrote {write('in_place', verdicts(counts))}")
    for (place, status), number in sorted(counts.items()):
        print(f"{place:8} {status:8} {number}")


if __name__ == "__main__":
    main()

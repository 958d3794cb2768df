"""Trains pairs of features on four processes: `python benchmarks/features.py`.

Every pair of features of tests/features/table.py is trained on every model of
tests/features/models.py and compared with plain torch in one process: losses, gradient norms,
parameters, their averages and optimizer state of four steps. `--count 7 --draw 24` draws cases of
seven features at random, and `--further` adds the second table. A row is one case: "right" with its
largest relative error, the reason of a refusal, or "wrong", which makes the script fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import read, write
from tests.features.feature import Case
from tests.features.sharded import Outcome, assert_right, judged
from tests.features.table import combinations, drawn, further
from tests.features.zoo import FAMILIES, OTHERS


def row(case: Case, ranks: Sequence[Outcome]) -> dict[str, object]:
    """A row of the table."""
    worst = max(ranks, key=lambda outcome: outcome.error)
    cells: dict[str, object] = {"model": case.recipe.model, "features": " + ".join(case.features)}
    try:
        assert_right(case, ranks)
    except AssertionError as error:
        print(error, flush=True)
        return {**cells, "outcome": "wrong", "error": f"{worst.error:.1e}", "reason": worst.refused}
    if worst.refused:
        return {**cells, "outcome": "refused", "error": "", "reason": worst.refused}
    return {**cells, "outcome": "right", "error": f"{worst.error:.1e}", "reason": ""}


def main() -> int:
    """Judge all cases and write results/features.csv; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=[*FAMILIES, *OTHERS])
    parser.add_argument("--count", type=int, default=2, help="features at a time")
    parser.add_argument(
        "--without", nargs="+", default=[], help="leave out cases with all of these"
    )
    parser.add_argument("--draw", type=int, help="so many of the cases, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--further", action="store_true", help="the second table's features")
    parser.add_argument("--missing", action="store_true", help="only cases that have no row yet")
    options = parser.parse_args()
    cases: list[Case] = []
    for model in options.models:
        if options.draw is not None:
            cases += drawn(model, options.count, options.draw, options.seed)
        else:
            cases += further(model, 5) if options.further else combinations(model, options.count)
    left_out = set(options.without)
    cases = [case for case in cases if not left_out or not left_out <= set(case.features)]
    if options.missing:
        there = {(each["model"], each["features"]) for each in read("features")}
        cases = [c for c in cases if (c.recipe.model, " + ".join(c.features)) not in there]
    rows = []
    for case, ranks in judged(cases):
        rows.append(row(case, ranks))
        print(*rows[-1].values(), sep="  ", flush=True)
        write("features", rows[-1:], keys=("model", "features"))
    return int(any(each["outcome"] == "wrong" for each in rows))


if __name__ == "__main__":
    sys.exit(main())

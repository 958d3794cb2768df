"""Counts operators with rules and tests the rules: `python -m benchmarks.operators`.

Every rule is proved on its examples; torch's own samples of its operators (OpInfo) are captured and
run sharded; DTensor's splits are compared with the rules'. There is one CSV for each, with one row
for each operator, and the table of docs/results/correctness.md, which `--table` prints again
without running anything.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.intra_op.proofs.prove import prove
from autopar.intra_op.rules import families, rules
from benchmarks.harness import RESULTS, write

Row = dict[str, Any]
# Reasons for splits that DTensor allows and a rule does not; see tests/oracles/dtensor.py.
KINDS = ("sum", "mean", "other", "strided", "split", "wrong")
NAMES = ("coverage_rules", "coverage_opinfo", "coverage_dtensor")


def proved() -> Iterator[Row]:
    """Proves every rule on its examples, on one and on two mesh axes."""
    for family, members in families().items():
        for rule in members:
            report = prove(rule)
            yield {
                "operator": rule.op,
                "family": family,
                "examples": len(rule.examples),
                "strategies": report.strategies,
                "proved": report.proved,
            }


def sampled() -> Iterator[Row]:
    """Judges torch's samples of every operator, on 2 and on 4 devices."""
    from tests.oracles.opinfo import judge, operators

    for name, op in sorted(operators().items()):
        verdict = judge(op)
        yield {
            "operator": name,
            "status": verdict.status,
            "reason": verdict.reason,
            "samples": verdict.samples,
            "refused": sum(verdict.refused.values()),
            "strategies": sum(verdict.split.values()),
        }


def compared() -> Iterator[Row]:
    """Compares DTensor's splits with those of every rule's examples, on two devices."""
    from tests.oracles.dtensor import OURS, compare, fake_mesh

    with fake_mesh() as mesh:
        for op, rule in sorted(rules().items()):
            if op not in OURS:
                result = compare(rule, mesh)
                yield {
                    "operator": op,
                    "known": not result.unknown,
                    "both": result.both,
                    "ours": result.ours,
                    **{kind: sum(item.kind == kind for item in result.theirs) for kind in KINDS},
                }


def read(name: str) -> list[dict[str, str]]:
    """Returns the rows of results/NAME.csv."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """Returns the table of docs/results, from the CSVs."""
    lines = [
        "| compared with | operators | strategies | outcome |",
        "|---|---|---|---|",
        *map(_line, (_examples(), _samples(), _splits())),
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _examples() -> Sequence[str]:
    rows = read("coverage_rules")
    wrong = sum(row["proved"] != "True" for row in rows)
    outcome = f"{wrong} are wrong" if wrong else "all are proved"
    return "each rule's own examples", f"{len(rows)}", f"{_sum(rows, 'strategies'):,}", outcome


def _samples() -> Sequence[str]:
    """Counts operators by status, and those that are not captured by reason."""
    rows = read("coverage_opinfo")
    status = Counter(row["status"] for row in rows)
    reasons = Counter(row["reason"] for row in rows if row["status"] == "refused")
    outcome = (
        f"{status['splits']} are correct when sharded, {status['whole']} run whole by their rule, "
        f"{status['random']} draw random numbers, {status['unknown']} have no rule for some part, "
        f"{status['fails'] or 'none'} are wrong; {status['refused']} cannot be captured: "
        + ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common())
    )
    return "torch's samples (OpInfo)", f"{len(rows)}", f"{_sum(rows, 'strategies'):,}", outcome


def _splits() -> Sequence[str]:
    """Counts combinations of placements, over the operators that DTensor knows."""
    every = read("coverage_dtensor")
    rows = [row for row in every if row["known"] == "True"]
    counts = {kind: _sum(rows, kind) for kind in KINDS}
    wrong = counts.pop("wrong")
    least = sum(not any(int(row[kind]) for kind in counts) for row in rows)
    outcome = (
        f"{_sum(rows, 'ours')} more than DTensor allows; {sum(counts.values())} fewer ("
        + ", ".join(f"{kind} {number}" for kind, number in counts.items())
        + f"), and none fewer for {least} operators; {wrong} of DTensor's are wrong"
    )
    known = f"{len(rows)} of {len(every)}"
    return "DTensor, one mesh axis", known, f"{_sum(rows, 'both'):,} in common", outcome


def _sum(rows: Sequence[Mapping[str, str]], column: str) -> int:
    return sum(int(row[column]) for row in rows)


def main() -> None:
    """Runs the tests, writes their CSVs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table of the last run")
    if not parser.parse_args().table:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")  # some samples use deprecated features
        torch.set_num_threads(1)  # the tensors are tiny
        for name, rows in zip(NAMES, (proved, sampled, compared), strict=True):
            print(f"wrote {write(name, _with_progress(rows()))}", flush=True)
    print(table())


def _with_progress(rows: Iterator[Row]) -> Iterator[Row]:
    """Yields the rows and reports progress."""
    for number, row in enumerate(rows, 1):
        if sys.stderr.isatty():
            print(f"\r{number} {row['operator']:<60.60}", end="", file=sys.stderr, flush=True)
        yield row


if __name__ == "__main__":
    main()

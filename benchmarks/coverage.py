"""How many operators have a rule, and who says so: `python -m benchmarks.coverage`.

Every rule is proved on its examples; torch's own samples of its operators (OpInfo) are captured and
run in parts; DTensor's splits are laid beside the rules'. One CSV each, one row an operator, and
the table of the README, which `--table` prints again without running anything.
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

from autopar.intra_op.prove import prove
from autopar.intra_op.rules import families, rules
from benchmarks.harness import RESULTS, write

Row = dict[str, Any]
NAMES = ("coverage_rules", "coverage_opinfo", "coverage_dtensor")


def proved() -> Iterator[Row]:
    """Every rule on its examples, on one and on two mesh axes."""
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
    """torch's samples of every operator, on 2 and on 4 devices."""
    from tests.judges.opinfo import judge, operators

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
    """DTensor's splits of every rule's examples, on two devices."""
    from tests.judges.dtensor import OURS, compare, fake_mesh

    with fake_mesh() as mesh:
        for op, rule in sorted(rules().items()):
            if op not in OURS:
                found = compare(rule, mesh)
                yield {
                    "operator": op,
                    "known": not found.unknown,
                    "both": found.both,
                    "ours": found.ours,
                    "theirs": len(found.theirs),
                    "wrong": sum(item.kind == "wrong" for item in found.theirs),
                    "kinds": " ".join(sorted(found.kinds)),
                }


def read(name: str) -> list[dict[str, str]]:
    """The rows of results/NAME.csv."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """The README's table, from the CSVs."""
    proofs, verdicts, splits = map(read, NAMES)
    status = Counter(row["status"] for row in verdicts)
    known = [row for row in splits if row["known"] == "True"]
    right = sum(row["proved"] == "True" for row in proofs)
    lines = [
        "| judge | operators | right | strategies | not judged |",
        "|---|---|---|---|---|",
        f"| the rule's own examples | {len(proofs)} | {right} | {_sum(proofs, 'strategies'):,} | |",
        f"| torch's samples (OpInfo) | {len(verdicts)} | {_passed(status)} "
        f"| {_sum(verdicts, 'strategies'):,} | {_reasons(verdicts)} |",
        f"| DTensor, one mesh axis | {len(splits)} | {_as_much(known)} allow no less "
        f"| {_sum(known, 'both'):,} alike, {_sum(known, 'ours')} more, "
        f"{_sum(known, 'theirs') - _sum(known, 'wrong')} less "
        f"| {len(splits) - len(known)} that it does not know |",
    ]
    return "\n".join(lines)


def _sum(rows: Sequence[Mapping[str, str]], column: str) -> int:
    return sum(int(row[column]) for row in rows)


def _passed(status: Counter[str]) -> str:
    """How many run in parts, and how many whole; all of them compute the same."""
    whole = status["whole"] + status["random"]
    failed = f", {status['fails']} wrong" if status["fails"] else ""
    return f"{status['splits']} in parts, {whole + status['unknown']} whole{failed}"


def _reasons(verdicts: Sequence[Mapping[str, str]]) -> str:
    """Why operators cannot be captured, most frequent first."""
    count = Counter(row["reason"] for row in verdicts if row["status"] == "refused")
    return ", ".join(f"{number} {reason}" for reason, number in count.most_common())


def _as_much(rows: Sequence[Mapping[str, str]]) -> int:
    return sum(row["theirs"] == row["wrong"] for row in rows)


def main() -> None:
    """Run the judges, write their CSVs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table of the last run")
    if not parser.parse_args().table:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")  # samples try what is deprecated, too
        torch.set_num_threads(1)  # the tensors are tiny
        for name, rows in zip(NAMES, (proved, sampled, compared), strict=True):
            print(f"wrote {write(name, _told(rows()))}", flush=True)
    print(table())


def _told(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, while a person is told how far it is."""
    for number, row in enumerate(rows, 1):
        if sys.stderr.isatty():
            print(f"\r{number} {row['operator']:<60.60}", end="", file=sys.stderr, flush=True)
        yield row


if __name__ == "__main__":
    main()

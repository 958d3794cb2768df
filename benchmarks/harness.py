"""Shared parts of all benchmarks: child processes, CSV rows, and their provenance."""

from __future__ import annotations

import csv
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "images"


def provenance() -> dict[str, str]:
    """Machine, commit, versions and date; the last columns of every row."""
    return {
        "machine": f"{_processor()} x{torch.get_num_threads()}",
        "commit": _commit() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def _commit() -> str:
    """The checkout's, "" where there is no git or no repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _processor() -> str:
    """Returns the processor's name, as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(
    name: str, rows: Iterable[Mapping[str, Any]], *, keys: Sequence[str] | None = None
) -> Path:
    """Write rows to results/NAME.csv; returns the path.

    They replace the file, or with `keys` only those of its rows that agree with one of them there.
    Rows that were read from a file keep their provenance.
    """
    own = provenance()
    made = [
        {name: value for name, value in row.items() if name not in own} | own | _kept(row, own)
        for row in rows
    ]
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    if keys is not None and path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
        new = {tuple(str(row[key]) for key in keys) for row in made}
        made = [row for row in old if tuple(row[key] for key in keys) not in new] + made
        made.sort(key=lambda row: tuple(str(row[key]) for key in keys))
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = list(dict.fromkeys(column for row in made for column in row))
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(made)
    return path


def _kept(row: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """The provenance that a row brings along."""
    return {name: row[name] for name in own if name in row}


def child(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark script in a process of its own; the JSON of its last line.

    Raises:
        RuntimeError: the child failed; with the end of its output.
    """
    run = subprocess.run(
        [sys.executable, script, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{run.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return result


def middle(values: Sequence[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def read(name: str) -> list[dict[str, str]]:
    """The rows of results/NAME.csv."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def has(name: str) -> bool:
    """Returns whether there is results/NAME.csv."""
    return (RESULTS / f"{name}.csv").exists()


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for the pages of docs/results."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

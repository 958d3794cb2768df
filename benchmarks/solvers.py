"""Runs solvers on the instances of the contest: `python benchmarks/solvers.py --dir DIR`.

With `--only`, `--runs` and `--limit`, the results of other instances, runs and limits are kept.

DIR contains files `*-NAME.json.gz`. Published costs and time limits are read from `published.json`
next to DIR; without it, those columns stay empty. Every run is a process of its own, whose seconds
include reading the file. Writes results/solvers.csv, solvers_trace.csv (incumbent and bound against
time) and docs/images/solvers.svg.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import sys
import time
from math import log10
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.errors import InfeasibleError
from autopar.intra_op.contest import read_problem
from autopar.intra_op.problem import evaluate
from autopar.intra_op.solvers import solve
from benchmarks.harness import PICTURES, child, write

RUNS = ("auto:0", "auto:1", "ilp:0", "local_search:0")  # solver:seed
DEFAULT_LIMIT = 60.0
KEYS = ("instance", "solver", "seed", "limit_s")
COLUMNS = (
    *KEYS, "over_best", "over_winner", "nodes", "edges", "seconds", "read_s",
    "processor_s", "peak_gib", "cost", "bound", "feasible", "gap", "peak_of_limit", "error",
)  # fmt: skip


def measure(path: str, solver: str, limit: float, seed: int) -> dict[str, Any]:
    """Solve one instance in this process; cost, bound, seconds, peak GiB and the trace."""
    began = time.perf_counter()
    problem = read_problem(path)
    read = time.perf_counter() - began
    trace: list[tuple[float, float | None, float]] = []

    def watch(seconds: float, price: float, bound: float) -> None:
        trace.append((round(read + seconds, 3), price if price < 1e300 else None, bound))

    options: dict[str, Any] = {"time_limit": max(limit - read, 0.0), "work": limit, "seed": seed}
    options["watch"] = watch
    row: dict[str, Any] = {"nodes": len(problem.nodes), "edges": len(problem.edges)}
    try:
        found = solve(problem, solver, **options)
    except InfeasibleError as error:
        return row | {"cost": None, "error": error.what, "trace": trace}
    row["seconds"] = round(time.perf_counter() - began, 2)
    row["read_s"] = round(read, 2)
    row["processor_s"] = round(sum(os.times()[:4]), 2)
    row["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    result = evaluate(problem, found)
    row |= {"cost": result.cost, "bound": found.bound, "feasible": result.feasible}
    row["gap"] = (result.cost - found.bound) / abs(result.cost) if result.cost else 0.0
    row["peak_of_limit"] = result.peak / problem.memory_limit if problem.memory_limit else None
    return row | {"trace": trace}


def known(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the published figures of each instance, by its letter."""
    path = folder.resolve().parent / "published.json"
    if not path.exists():
        return {}
    return {row["bench"]: row for row in json.loads(path.read_text(encoding="utf-8"))["iopddl"]}


def main() -> None:
    """Run all instances and solvers, and write table, trace and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--only", default="", help="letters of instances, such as ABP")
    parser.add_argument("--runs", default=",".join(RUNS), help="solver:seed, separated by commas")
    parser.add_argument("--limit", type=float, help="seconds; the contest's by default")
    parser.add_argument("--measure", nargs=4, metavar=("FILE", "SOLVER", "LIMIT", "SEED"))
    options = parser.parse_args()
    if options.measure:
        path, solver, limit, seed = options.measure
        print(json.dumps(measure(path, solver, float(limit), int(seed))))
        return
    published = known(options.dir)
    rows: list[dict[str, Any]] = []
    traces: list[dict[str, Any]] = []
    for path in sorted(options.dir.glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz").rpartition("-")[2]
        if options.only and name not in options.only:
            continue
        facts = published.get(name, {})
        limit = options.limit or float(facts.get("timeout_s", DEFAULT_LIMIT))
        for wanted in options.runs.split(","):
            solver, _, seed = wanted.partition(":")
            seed = seed or "0"
            arguments = ["--dir", str(options.dir), "--measure", str(path), solver]
            run = child(__file__, [*arguments, str(limit), seed])
            head = {"instance": name, "solver": solver, "seed": int(seed), "limit_s": limit}
            traces += [
                head | dict(zip(("s", "cost", "bound"), t, strict=True)) for t in run.pop("trace")
            ]
            row = head | ratios(run, facts) | run
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
    table = [{column: row.get(column) for column in COLUMNS} for row in rows]
    print(f"wrote {write('solvers', table, keys=KEYS)}")
    path = write("solvers_trace", traces, keys=KEYS)
    print(f"wrote {path}")
    plot = PICTURES / "solvers.svg"
    with path.open(newline="", encoding="utf-8") as file:
        plot.write_text(
            drawn(list(map(_numbers, csv.DictReader(file))), published), encoding="utf-8"
        )
    print(f"wrote {plot}")


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    """A line of the trace as it was before it was written."""
    figures = {name: float(row[name]) if row[name] else None for name in ("s", "cost")}
    return {**row, **figures, "seed": int(row["seed"])}


def ratios(run: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Cost over the best known and over the contest's winner, less one."""
    found: dict[str, Any] = {}
    for column, key in (("over_best", "best_known_cost"), ("over_winner", "best_contest_cost")):
        if run.get("cost") and key in facts:
            found[column] = run["cost"] / facts[key] - 1
    return found


COLOURS = {"auto": "#0b6", "ilp": "#06c", "local_search": "#c60"}
WIDTH, HEIGHT, MARGIN = 300, 170, 36


def drawn(traces: list[dict[str, Any]], published: dict[str, dict[str, Any]]) -> str:
    """A picture: for each instance per cent above the best cost (log) against seconds (log)."""
    names = sorted({row["instance"] for row in traces})
    parts = []
    for k, name in enumerate(names):
        rows = [row for row in traces if row["instance"] == name and row["cost"]]
        longest = max((float(row["limit_s"]) for row in rows), default=0.0)
        rows = [row for row in rows if float(row["limit_s"]) == longest]
        best = min([row["cost"] for row in rows], default=1.0)
        best = min(best, published.get(name, {}).get("best_known_cost", best))
        left, top = MARGIN + (k % 3) * (WIDTH + 30), 30 + (k // 3) * (HEIGHT + 50)
        parts.append(f'<text x="{left}" y="{top - 8}">{name}</text>')
        parts.append(
            f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" '
            'stroke="#999"/>'
        )
        for label, at in (("100 %", 0.0), ("1 %", 0.4), ("0.01 %", 0.8)):
            parts.append(f'<text x="{left + 2}" y="{top + at * HEIGHT + 10:.0f}">{label}</text>')
        for label, at in (("1 s", 0.0), ("10 s", 0.4), ("100 s", 0.8)):
            parts.append(
                f'<text x="{left + at * WIDTH:.0f}" y="{top + HEIGHT + 12}">{label}</text>'
            )
        for solver, colour in COLOURS.items():
            runs = [row for row in rows if (row["solver"], row["seed"]) == (solver, 0)]
            points = [(row["s"], row["cost"]) for row in runs]
            line = _line(points, best, left, top)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
    for k, (solver, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{MARGIN + 90 * k}" y="12" fill="{colour}">{solver}</text>')
    width, height = 3 * (WIDTH + 40) + MARGIN, 60 + -(-len(names) // 3) * (HEIGHT + 50)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10">{"".join(parts)}</svg>\n'
    )


def _line(points: list[tuple[float, float]], best: float, left: float, top: float) -> str:
    """Steps down from one incumbent to the next: both axes span 2.5 and 5 decades."""

    found: list[str] = []
    last: float | None = None
    for seconds, cost in points:
        x = left + WIDTH * min(max(log10(max(seconds, 1e-3)) / 2.5, 0.0), 1.0)
        above = max(cost / best - 1, 1e-9)
        y = top + HEIGHT * min(max(-log10(above) / 5, 0.0), 1.0)
        found += [f"{x:.1f},{last:.1f}"] if last is not None else []
        found.append(f"{x:.1f},{y:.1f}")
        last = y
    return " ".join(found)


if __name__ == "__main__":
    main()

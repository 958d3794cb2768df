"""Compares the search methods of the literature.

Run `python benchmarks/methods.py --dir DIR --only BS`.

All methods get the same problem, time limit and evaluator; those that draw random numbers get two
seeds. Every run is a process of its own, whose seconds include reading the file (see `solvers`).
Writes results/methods.csv, methods_trace.csv (cheapest choice against time) and
docs/images/methods.svg. With `--methods`, results of the others are kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import PICTURES, child, write
from benchmarks.solvers import measure

UNSEEDED = ("greedy", "propagate", "elimination")
SEEDED = ("random", "mcmc", "annealing", "local_search", "auto")
METHODS = (*UNSEEDED, *SEEDED)
KEYS = ("instance", "method", "seed")
COLUMNS = (*KEYS, "limit_s", "cost", "above_best", "bound", "seconds", "processor_s", "error")


def main() -> None:
    """Runs all methods on all instances; writes the table, the trace and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--only", default="", help="letters of instances, such as BS")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of each run")
    parser.add_argument("--measure", nargs=4, metavar=("FILE", "METHOD", "LIMIT", "SEED"))
    options = parser.parse_args()
    if options.measure:
        path, method, limit, seed = options.measure
        print(json.dumps(measure(path, method, float(limit), int(seed))))
        return
    rows: list[dict[str, Any]] = []
    traces: list[dict[str, Any]] = []
    for path in sorted(options.dir.glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz").rpartition("-")[2]
        if options.only and name not in options.only:
            continue
        for method in options.methods.split(","):
            for seed in range(2 if method in SEEDED else 1):
                head = {"instance": name, "method": method, "seed": seed, "limit_s": options.limit}
                asked = [str(path), method, str(options.limit), str(seed)]
                run = child(__file__, ["--dir", str(options.dir), "--measure", *asked])
                points = [(s, cost) for s, cost, _ in run.pop("trace") if cost]
                points += [(run["seconds"], run["cost"])] if run["cost"] else []
                traces += [head | {"s": s, "cost": cost} for s, cost in points]
                rows.append(head | run)
                print("  ".join(f"{k} {rows[-1].get(k)}" for k in COLUMNS), flush=True)
    best: dict[str, float] = {}
    for row in rows:
        if row["cost"]:
            best[row["instance"]] = min(row["cost"], best.get(row["instance"], row["cost"]))
    for row in rows:
        row["above_best"] = row["cost"] / best[row["instance"]] - 1 if row["cost"] else None
    table = [{column: row.get(column) for column in COLUMNS} for row in rows]
    print(f"wrote {write('methods', table, keys=KEYS)}")
    trace = write("methods_trace", traces, keys=KEYS)
    print(f"wrote {trace}")
    with trace.open(newline="", encoding="utf-8") as file:
        print(f"wrote {drawn(list(csv.DictReader(file)))}")


def drawn(rows: list[dict[str, str]]) -> Path:
    """Draws cost above the best against seconds, both in logarithms; returns the picture's path."""
    from matplotlib.figure import Figure

    names = sorted({row["instance"] for row in rows})
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    for k, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), k + 1)
        here = [row for row in rows if row["instance"] == name]
        best = min(float(row["cost"]) for row in here)
        end = max(float(row["limit_s"]) for row in here)
        for colour, method in enumerate(METHODS):
            mine = [row for row in here if (row["method"], row["seed"]) == (method, "0")]
            points = sorted((float(row["s"]), float(row["cost"])) for row in mine)
            if points:
                x = [s for s, _ in points]
                y = [max(100 * (cost / best - 1), 1e-4) for _, cost in points]
                axes.step(
                    [*x, end], [*y, y[-1]], where="post", color=f"C{colour}", label=method,
                    marker="o" if len(points) == 1 else "", markevery=[0],
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", title=name, xlabel="seconds, with reading")
        axes.set_ylabel("cost above the best, %")
        axes.legend(fontsize="small")
    path = PICTURES / "methods.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


if __name__ == "__main__":
    main()

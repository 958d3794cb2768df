"""Runs solvers on the instances of the contest: `python benchmarks/solvers.py --dir DIR`.

With `--only`, `--runs` and `--limit`, the results of other instances, runs and limits are kept.

DIR contains files `*-NAME.json.gz`. Published costs and time limits are read from `published.json`
next to DIR; without it, those columns stay empty. Every run is a process of its own, whose seconds
include reading the file. Writes results/solvers.csv, solvers_trace.csv (incumbent and bound against
time) and docs/images/solvers.svg; `--draw` draws that again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.errors import InfeasibleError
from autopar.intra_op.contest import read_problem
from autopar.intra_op.problem import evaluate
from autopar.intra_op.solvers import solve
from benchmarks.harness import PICTURES, child, read, write

RUNS = ("auto:0", "auto:1", "ilp:0", "local_search:0")  # solver:seed
DEFAULT_LIMIT = 60.0
COLOURS = {"auto": "C2", "ilp": "C0", "local_search": "C1"}
LEAST = 1e-5  # per cent; the picture shows smaller distances as this one
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
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--draw", action="store_true", help="draw the picture again, run nothing")
    parser.add_argument("--only", default="", help="letters of instances, such as ABP")
    parser.add_argument("--runs", default=",".join(RUNS), help="solver:seed, separated by commas")
    parser.add_argument("--limit", type=float, help="seconds; the contest's by default")
    parser.add_argument("--measure", nargs=4, metavar=("FILE", "SOLVER", "LIMIT", "SEED"))
    options = parser.parse_args()
    if options.draw:
        print(f"wrote {drawn(read('solvers_trace'), read('solvers'))}")
        return
    if options.dir is None:
        parser.error("--dir is needed to run solvers")
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
    print(f"wrote {write('solvers_trace', traces, keys=KEYS)}")
    print(f"wrote {drawn(read('solvers_trace'), read('solvers'))}")


def ratios(run: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Cost over the best known and over the contest's winner, less one."""
    found: dict[str, Any] = {}
    for column, key in (("over_best", "best_known_cost"), ("over_winner", "best_contest_cost")):
        if run.get("cost") and key in facts:
            found[column] = run["cost"] / facts[key] - 1
    return found


def drawn(traces: list[dict[str, str]], table: list[dict[str, str]]) -> Path:
    """Draws per cent above the best cost against seconds, both in logarithms, by instance.

    Of each instance it shows the runs with the longest limit and seed 0, by the costs of the best
    known solutions where these were published, else of the best run.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "solvers"  # the same file from the same rows
    names = sorted({row["instance"] for row in traces})
    height = -(-len(names) // 3)
    figure = Figure(figsize=(11, 2.8 * height), layout="constrained")
    for k, name in enumerate(names):
        axes = figure.add_subplot(height, 3, k + 1)
        best = _best(name, table)
        rows = [row for row in traces if row["instance"] == name and row["cost"]]
        longest = max(float(row["limit_s"]) for row in rows)
        for solver, colour in COLOURS.items():
            points = [
                (float(row["s"]), max(100 * (float(row["cost"]) / best - 1), LEAST))
                for row in rows
                if (row["solver"], row["seed"], float(row["limit_s"])) == (solver, "0", longest)
            ]
            if points:
                x, y = zip(*points, strict=True)
                axes.step(
                    [*x, longest],
                    [*y, y[-1]],
                    where="post",
                    color=colour,
                    label=solver,
                    marker="o",
                    markersize=3,
                    markevery=[0],
                    clip_on=False,
                )
        axes.set(xscale="log", yscale="log", title=name, xlim=(1, longest), ylim=(LEAST, 300))
        axes.set(xlabel="seconds, with reading", ylabel="% above the best")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small", frameon=False)
    path = PICTURES / "solvers.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def _best(name: str, table: list[dict[str, str]]) -> float:
    """Returns the best known cost of an instance, or that of the best run."""
    rows = [row for row in table if row["instance"] == name and row["cost"]]
    published = [
        float(row["cost"]) / (1 + float(row["over_best"])) for row in rows if row["over_best"]
    ]
    return min([float(row["cost"]) for row in rows] + published)


if __name__ == "__main__":
    main()

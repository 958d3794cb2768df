"""Plans, trains and compares models of many families: `python benchmarks/families.py`.

Every model of tests/support/families.py is captured and planned in a process of its own, on four
devices, on two by two, and on two nodes of eight H100. Then all train three steps on four processes
of this machine, with the plans of the first two meshes, and are compared with training in one
process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from benchmarks.harness import child, write
from tests.support.families import FAMILIES, make
from tests.support.ranks import run_ranks
from tests.training.test_families import CLUSTER, GRID, LINE, Jobs, train_whole

MESHES = {"line": LINE, "grid": GRID, "cluster": CLUSTER}


def measure(name: str) -> dict[str, Any]:
    """Measures the seconds of capturing and planning a model; lists operators without a rule."""
    model, batch = make(name)
    options = Options()
    began = time.perf_counter()
    graph = capture_graph(model, (), batch, options, Trace(None)).graph
    row: dict[str, Any] = {"operators": sum(not node.is_leaf for node in graph.nodes)}
    row["capture_s"] = round(time.perf_counter() - began, 2)
    whole: dict[str, float] = {}
    for label, mesh in MESHES.items():
        began = time.perf_counter()
        plan = make_plan(graph, Mesh.parse(mesh), options, Trace(None))
        row[f"plan_{label}_s"] = round(time.perf_counter() - began, 2)
        whole = plan.replicated
    row["whole"] = " ".join(sorted({graph[node].op for node in whole}))
    row["whole_s"] = sum(whole.values())
    return row


def train(names: list[str]) -> dict[str, dict[str, float]]:
    """The largest relative error of a loss or a parameter after three steps, by model and mesh."""
    jobs = Jobs(names)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    alone = {name: train_whole(name) for name in names}
    for label in ("line", "grid"):
        ranks = run_ranks(jobs.train, MESHES[label])
        for name in names:
            errors = [max(rank[name].errors(alone[name])) for rank in ranks]
            found[name][f"error_{label}"] = float(f"{max(errors):.1e}")
    return found


def main() -> None:
    """Measure all families and write results/families.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--measure", help="measure one model in this process, as JSON")
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    rows = []
    for name in options.models:
        row = {"model": name, **child(__file__, ["--measure", name])}
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    errors = train(options.models)
    rows = [{**row, **errors[row["model"]]} for row in rows]
    for row in rows:
        print(row["model"], errors[row["model"]])
    print(f"wrote {write('families', rows)}")


if __name__ == "__main__":
    main()

"""Predicts step time against memory per device: `python benchmarks/frontier.py`.

It plans one model on one node within less and less memory, for a table in docs/how-to. Nothing
runs; all figures are predictions. It ends with an error unless less memory takes more time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.frontier import frontier
from autopar.planning.options import Options
from autopar.planning.planner import Planner
from autopar.planning.trace import Trace
from autopar.zoo import load
from benchmarks.harness import write

MODEL, BATCH, MESH = "llama-3-8b", 8, "H100: gpu=8"


def main() -> None:
    """Plan under tighter and tighter limits and write results/frontier.csv."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    model, inputs = load(MODEL, batch=BATCH)
    graph = capture_graph(model, (), inputs, Options(), Trace(None)).graph
    planner = Planner(graph, Mesh.parse(MESH), Options(), Trace(None))
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for plan in frontier(planner.plan):
        row = {
            "model": MODEL,
            "batch": BATCH,
            "mesh": MESH,
            "memory_gib": round(plan.predicted.peak_bytes / 2**30, 1),
            "step_seconds": round(plan.predicted.step_seconds, 4),
            "recomputed": ", ".join(f"{run} {how}" for run, how in plan.recompute.items()),
            "planning_s": round(time.perf_counter() - began, 1),
        }
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
        began = time.perf_counter()
    for one, other in itertools.pairwise(rows):
        assert other["memory_gib"] < one["memory_gib"]
        assert other["step_seconds"] > one["step_seconds"]
    print(f"wrote {write('frontier', rows)}")


if __name__ == "__main__":
    main()

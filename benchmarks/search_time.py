"""Measures the time of planning pipelines: `python benchmarks/search_time.py`.

It runs `autopar plan MODEL --mesh MESH --global-batch SAMPLES` like a user, each time in a process
of its own, from the start of Python to the plan's file. Layers, stages, sub-meshes, microbatches
and schedule are searched for together, and every stage is planned. Seconds of a step are simulated.
Writes results/search_time.csv and prints the table of docs/results. The machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.grid import CASES, Case
from benchmarks.harness import ROOT, markdown, middle, write


def timed(case: Case) -> tuple[float, dict[str, Any]]:
    """Wall seconds of the command, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from autopar.cli import main; main()", "plan", case.model]
        command += ["--mesh", case.mesh, "--global-batch", str(case.batch), "--json"]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "-o", str(Path(folder, "plan.toml"))],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return time.perf_counter() - began, json.loads(done.stdout)


def row(case: Case, repeats: int) -> dict[str, Any]:
    """One row: a model on a cluster."""
    runs = [timed(case) for _ in range(repeats)]
    seconds, (_, made) = [taken for taken, _ in runs], runs[0]
    return {
        "model": case.model,
        "mesh": case.mesh,
        "batch": case.batch,
        "seconds": round(middle(seconds), 1),
        "fastest": round(min(seconds), 1),
        "slowest": round(max(seconds), 1),
        "runs": repeats,
        "schedule": made["schedule"],
        "stages": len(made["stages"]),
        "microbatches": made["microbatches"],
        "step_seconds": round(made["predicted"]["step_seconds"], 3),
        "peak_gib": round(made["predicted"]["peak_bytes"] / 2**30, 2),
    }


def main() -> None:
    """Plan, time, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    found = [row(case, repeats) for case in CASES]
    heads = ("model", "mesh", "batch", "seconds", "range", "plan", "simulated step", "memory")
    lines = (
        (
            one["model"],
            one["mesh"],
            str(one["batch"]),
            str(one["seconds"]),
            f"{one['fastest']} to {one['slowest']}",
            f"{one['schedule']}, {one['stages']} stages, {one['microbatches']} microbatches",
            f"{one['step_seconds']:.4g} s",
            f"{one['peak_gib']} GiB",
        )
        for one in found
    )
    print(markdown(heads, lines))
    print(write("search_time", found))


if __name__ == "__main__":
    main()

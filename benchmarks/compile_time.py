"""Measures the seconds and the peak memory of planning: `python benchmarks/compile_time.py`.

Nothing is trained and no GPU is needed: models have no weights, and meshes are texts. Every case
runs in a process of its own, `--repeats` times; a row contains medians, the range of the total, and
processor seconds, which depend less on other load.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.codegen.emit import emit
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.intra_op.build import build, layouts
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from autopar.zoo import load
from benchmarks.harness import child, middle, write

CASES = (
    # model, layers (0: all), batch, sequence, mesh
    ("llama-3-8b", 2, 64, 4096, "H100: node=8, gpu=8"),
    ("llama-3-8b", 8, 64, 4096, "H100: node=8, gpu=8"),
    ("llama-3-8b", 32, 64, 4096, "H100: node=8, gpu=8"),
    ("llama-3.1-405b", 126, 64, 4096, "H100: node=64, gpu=8"),
)
STAGES = ("capture", "strategies", "reshardings", "solve", "emit")


class Clock:
    """Seconds between marks, by the name of the stage that begins at each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._since = "", time.perf_counter()

    def mark(self, stage: str) -> None:
        """End the running stage and begin another."""
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now


def measure(name: str, layers: int, batch: int, seq: int, text: str) -> dict[str, float]:
    """Plan one model; seconds by stage, lines of source and peak GiB of this process."""
    model, inputs = load(name, batch=batch, seq=seq, layers=layers or None)
    mesh = Mesh.parse(text)
    prices = AnalyticModel(mesh)
    clock, processor = Clock(), time.process_time()
    clock.mark("capture")
    graph = capture_graph(model, (), inputs, Options(), Trace(None)).graph
    limit = device(mesh).memory
    built = build(graph, mesh, prices, rules(), memory_limit=limit, progress=clock.mark)
    clock.mark("solve")
    solution = solve(built.problem)
    nodes = layouts(built, graph, solution.choice)
    clock.mark("emit")
    plan = StagePlan(fingerprint(graph), mesh, nodes, predicted=built.figures(solution.choice))
    source = emit(graph, plan, prices.collective)
    clock.mark("")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {**clock.seconds, "total": sum(clock.seconds.values())}
    found["processor"] = time.process_time() - processor
    return {**found, "source_lines": len(source.splitlines()), "peak_gib": peak}


def main() -> None:
    """Measure all cases and write results/compile_time.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", type=int, help="measure one case in this process, as JSON")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(*CASES[options.case])))
        return
    rows = []
    for number, (name, layers, batch, seq, mesh) in enumerate(CASES):
        runs = [child(__file__, ["--case", str(number)]) for _ in range(options.repeats)]
        row = {"model": name, "layers": layers, "batch": batch, "seq": seq, "mesh": mesh}
        row |= {f"{stage}_s": round(middle([r[stage] for r in runs]), 2) for stage in STAGES}
        totals = [run["total"] for run in runs]
        row |= {"total_s": round(middle(totals), 2)}
        row |= {"least_s": round(min(totals), 2), "most_s": round(max(totals), 2)}
        row |= {"processor_s": round(middle([run["processor"] for run in runs]), 2)}
        row |= {"peak_gib": round(max(run["peak_gib"] for run in runs), 2)}
        row |= {"source_lines": int(runs[0]["source_lines"]), "repeats": options.repeats}
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    print(f"wrote {write('compile_time', rows)}")


if __name__ == "__main__":
    main()

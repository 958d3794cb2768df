"""Plans of Llama 3 8B for long sequences: `python benchmarks/long_context.py`.

One sequence of 128k, 512k or 1M tokens on 8 to 64 H100, trained in bfloat16 with AdamW. Seconds and
bytes are simulated: nothing is run. Writes results/long_context.csv and prints the table of
docs/results/planning.md. --lengths and --nodes pick rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.cli.common.model_options import capture_model
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from benchmarks.harness import markdown, write

MODEL = "llama-3-8b"
LENGTHS = (2**17, 2**19, 2**20)
NODES = (1, 8, 2, 4)
ATTENTION = "aten.scaled_dot_product_attention"
HEADS = ("tokens", "devices", "attention", "recomputed", "GiB per device", "s per step", "tokens/s")
COLUMNS = (
    "tokens",
    "devices",
    "attention",
    "recompute",
    "peak_gib",
    "step_seconds",
    "tokens_per_s",
)


def attention_of(plan: StagePlan, graph: Graph) -> str:
    """The form of attention in most blocks, and the layout of its queries."""
    seen: Counter[str] = Counter()
    for node in graph.folded:
        if node.op == ATTENTION:
            entry = plan.nodes[node.name]
            shape, layout = entry.operands[0]
            seen[f"{entry.form or 'plain'} {layout.format(shape)}"] += 1
    return seen.most_common(1)[0][0]


def row(length: int, nodes: int) -> dict[str, Any]:
    """One row: the chosen plan, its memory and speed."""
    mesh = Mesh.parse(f"H100: node={nodes}, gpu=8" if nodes > 1 else "H100: gpu=8")
    began = time.perf_counter()
    options = Options()
    graph = capture_model(ModelSpec(MODEL, 1, length, None), options, Trace(None))
    made: dict[str, Any] = {
        "model": MODEL, "tokens": length, "devices": mesh.size, "mesh": str(mesh),
        "attention": "none fits", "recompute": "", "peak_gib": "", "step_seconds": "",
        "tokens_per_s": "",
    }  # fmt: skip
    try:
        plan = make_plan(graph, mesh, options, Trace(None))
    except InfeasibleError as error:
        print(error, file=sys.stderr)
        return made | {"planning_s": round(time.perf_counter() - began, 1)}
    seconds = plan.predicted.step_seconds
    return made | {
        "attention": attention_of(plan, graph),
        "recompute": "; ".join(map(str, plan.recompute.values())),
        "peak_gib": round(plan.predicted.peak_bytes / 2**30, 1),
        "step_seconds": round(seconds, 3),
        "tokens_per_s": round(length / seconds),
        "planning_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Plan, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--nodes", nargs="*", type=int, default=NODES)
    given = parser.parse_args()
    rows = []
    for length in given.lengths:
        for nodes in given.nodes:
            rows.append(row(length, nodes))
            print(rows[-1], flush=True)
            write("long_context", rows[-1:], keys=("tokens", "devices"))
    print(markdown(HEADS, [[str(made[key]) for key in COLUMNS] for made in rows]))


if __name__ == "__main__":
    main()

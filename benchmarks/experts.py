"""Compares plans with and without dispatch of tokens: `python benchmarks/experts.py [MODEL...]`.

Published mixtures on 16 nodes of eight H100, a sample of 4096 tokens a device, planned with and
without strategies that split tokens and experts along one axis. Seconds and bytes are simulated:
nothing is run. Writes
results/experts.csv and prints the table of docs/results/planning.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.cli.common.model_options import capture_model
from autopar.errors import InfeasibleError
from autopar.intra_op.rule_table import table
from autopar.ir.mesh import Mesh
from autopar.operators.exchange import exchanged
from autopar.operators.mixture import MIXTURE, by_name, dispatch_axes
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from benchmarks.harness import markdown, write

SEQUENCE = 4096
MODELS = ("mixtral-8x22b", "qwen3-235b-a22b", "deepseek-v3")


def planned(
    name: str, mesh: Mesh, layers: int | None, dispatch: bool
) -> tuple[StagePlan | None, Any]:
    """The plan, None where none fits, and the graph."""
    rules = table()
    rules[MIXTURE] = replace(rules[MIXTURE], together="e ..." if dispatch else "")
    options = Options(table=rules)
    wanted = ModelSpec(name, mesh.size, SEQUENCE, layers)
    graph = capture_model(wanted, options, Trace(None))
    try:
        return make_plan(graph, mesh, options, Trace(None)), graph
    except InfeasibleError as error:
        print(error, file=sys.stderr)
        return None, graph


def row(name: str, mesh: Mesh, layers: int | None, dispatch: bool) -> dict[str, Any]:
    """One row: a model with or without dispatch."""
    began = time.perf_counter()
    plan, graph = planned(name, mesh, layers, dispatch)
    made: dict[str, Any] = {
        "model": name, "layers": layers or "all", "mesh": str(mesh), "samples": mesh.size,
        "dispatch": dispatch, "step_seconds": "", "peak_gib": "", "experts": "", "tokens": "",
        "over": "", "sent_mib": "", "planning_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    if plan is None:
        return made
    node = next(n for n in graph.folded if n.op == MIXTURE)
    entry = plan.nodes[node.name]
    into = tuple(layout for _, layout in entry.operands)
    types = tuple(graph[name].type for name in node.inputs)
    named = by_name(node, entry.operands)
    sent = exchanged(node, types, into, plan.mesh)[0]
    return made | {
        "step_seconds": round(plan.predicted.step_seconds, 3),
        "peak_gib": round(plan.predicted.peak_bytes / 2**30, 1),
        "experts": named["up"][1].format(named["up"][0]),
        "tokens": named["x"][1].format(named["x"][0]),
        "over": " ".join(dispatch_axes(node, into)),
        "sent_mib": round(max((call.nbytes for call in sent), default=0) / 2**20, 1),
    }


def main() -> None:
    """Plan, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--mesh", default="H100: node=16, gpu=8")
    parser.add_argument("--layers", type=int, help="plan so many blocks only")
    given = parser.parse_args()
    mesh = Mesh.parse(given.mesh)
    rows = []
    for name in given.models:
        for dispatch in (False, True):
            rows.append(row(name, mesh, given.layers, dispatch))
            print(rows[-1], flush=True)
    keys = ("model", "mesh", "layers", "dispatch")
    print(f"wrote {write('experts', rows, keys=keys)}")
    heads = ("model", "dispatch", "s a step", "GiB", "experts", "tokens")
    picked = ("model", "dispatch", "step_seconds", "peak_gib", "experts", "tokens")
    print(markdown(heads, [[str(r[key]) for key in picked] for r in rows]))


if __name__ == "__main__":
    main()

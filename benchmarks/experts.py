"""Compares layouts of experts: `python benchmarks/experts.py [MODEL...] [--nodes N]`.

Published mixtures on nodes of eight H100, a sample of 4096 tokens a device: without strategies by
which tokens travel to their experts, as the solver chooses, and with experts pinned inside a node
(E+D) or across nodes (D+E). Seconds and bytes are simulated: nothing is run. Writes
results/experts.csv, one part for each model and number of nodes (DeepSeek-V3 takes minutes for each
of `--ways`), and prints the table of docs/results/planning.md.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.cli.common.model_options import capture_model
from autopar.errors import InfeasibleError, PinError
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.operators.exchange import exchanged
from autopar.operators.forms import PLAIN
from autopar.operators.mixture import MIXTURE, by_name, dispatch_axes
from autopar.pins import form
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from benchmarks.harness import markdown, write

SEQUENCE = 4096
NODES = (16, 64, 256)
MODELS = ("mixtral-8x22b", "qwen3-235b-a22b", "deepseek-v3")


WAYS = ("no dispatch", "chosen", "E+D", "D+E")


def leaf(graph: Graph, name: str) -> Node:
    """Returns the parameter that a value is, or is a share of."""
    node = graph[name]
    while node.op != "param":
        node = graph[node.inputs[0]]
    return node


def options_of(way: str, graph: Graph, options: Options) -> Options:
    """Returns the options that place experts in one of `WAYS`."""
    if way == "chosen":
        return options
    node = next(n for n in graph.folded if n.op == MIXTURE)
    if way == "no dispatch":
        rules = options.table | {MIXTURE: replace(options.table[MIXTURE], together="")}
        return replace(options, table=rules, pins=form(node.source.module, PLAIN))
    down = leaf(graph, by_name(node, node.inputs)["down"])
    sizes, rows = (list(map(str, t.shape)) for t in (down.type, node.type))
    sizes[0] += "@gpu" if way == "E+D" else "@node"
    rows[0] += "@node@gpu"
    keys = (re.sub(r"\.\d+\.", ".*.", text) for text in (down.target, node.source.module))
    return replace(
        options,
        pins={key: f"[{', '.join(shape)}]" for key, shape in zip(keys, (sizes, rows), strict=True)},
    )


def row(name: str, mesh: Mesh, layers: int | None, way: str, graph: Graph) -> dict[str, Any]:
    """One row: a model in one way, without figures where no plan fits or computes so."""
    began = time.perf_counter()
    made: dict[str, Any] = {
        "model": name, "layers": layers or "all", "mesh": str(mesh), "samples": mesh.size,
        "experts_lie": way, "step_seconds": "", "peak_gib": "", "experts": "", "tokens": "",
        "over": "", "sent_mib": "", "planning_s": "",
    }  # fmt: skip
    try:
        options = options_of(way, graph, Options())
        plan = make_plan(graph, mesh, options, Trace(None))
    except (InfeasibleError, PinError) as error:
        print(name, mesh, way, str(error).partition("\n")[0], file=sys.stderr)
        return made
    node = next(n for n in graph.folded if n.op == MIXTURE)
    entry = plan.nodes[node.name]
    into = tuple(layout for _, layout in entry.operands)
    types = tuple(graph[name].type for name in node.inputs)
    named = by_name(node, entry.operands)
    split = named["up"][1].dims[0]
    if split != {"E+D": ("gpu",), "D+E": ("node",)}.get(way, split):
        print(name, mesh, way, f"weights are moved to {split} for the operator", file=sys.stderr)
        return made
    sent = exchanged(node, types, into, plan.mesh, entry.form)[0]
    return made | {
        "step_seconds": round(plan.predicted.step_seconds, 3),
        "peak_gib": round(plan.predicted.peak_bytes / 2**30, 1),
        "experts": named["up"][1].format(named["up"][0]),
        "tokens": named["x"][1].format(named["x"][0]),
        "over": " ".join(dispatch_axes(node, into)) + (f" by {entry.form}" if entry.form else ""),
        "sent_mib": round(max((call.nbytes for call in sent), default=0) / 2**20, 1),
        "planning_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Plan, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--layers", type=int, help="plan so many blocks only")
    given = parser.parse_args()
    rows, keys = [], ("model", "mesh", "layers", "experts_lie")
    for nodes, name in itertools.product(given.nodes, given.models):
        mesh = Mesh.parse(f"H100: node={nodes}, gpu=8")
        wanted = ModelSpec(name, mesh.size, SEQUENCE, given.layers)
        graph = capture_model(wanted, Options(), Trace(None))
        for way in given.ways:
            rows.append(row(name, mesh, given.layers, way, graph))
            print(f"wrote {write('experts', rows[-1:], keys=keys)}: {rows[-1]}", flush=True)
    heads = ("model", "mesh", "experts", "s a step", "GiB", "experts", "tokens")
    picked = ("model", "mesh", "experts_lie", "step_seconds", "peak_gib", "experts", "tokens")
    print(markdown(heads, [[str(r[key]) for key in picked] for r in rows]))


if __name__ == "__main__":
    main()

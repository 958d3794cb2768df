"""Solves autopar's own strategy problems: `python benchmarks/problems.py`.

Every model is captured once, in a process of its own, and its problem is built and solved on every
mesh, without a memory limit and with one that rules out the cheapest plan. That limit is three
tenths of the way from the least memory of a plan of the optimal cost to the least memory of all
choices. Rows contain the size of the problem, what the reductions left, cost, bound, gap and
seconds. For models of eight equal blocks, the cost is compared with that of the unfolded graph,
where every block may have a plan of its own. With `--models` and `--meshes`, other rows stay
unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

from autopar.cost.model import AnalyticModel
from autopar.errors import InfeasibleError
from autopar.intra_op.build import build
from autopar.intra_op.problem import evaluate, frugal
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.zoo import load
from benchmarks.harness import child, write
from tests.support.families import UNet

MESHES = {
    "8": "H100: gpu=8",
    "8x8": "H100: node=8, gpu=8",
    "64x8": "H100: node=64, gpu=8",
    "4x4x4": "H100: node=4, row=4, column=4",
}
FOLDED_ON = ("8", "8x8")
LAYERS = 8
TIGHT = 0.3
TIME_LIMIT = 60.0
KEYS = ("model", "mesh", "memory")

Model = tuple[nn.Module, dict[str, Tensor]]


def unet() -> Model:
    """A U-Net of the size used for diffusion on latents of 64 x 64 (arXiv:2112.10752)."""
    with torch.device("meta"):
        image, noise = torch.randn(2, 512, 4, 64, 64)
        model = UNet(width=320, levels=3)
        return model, {"image": image, "noise": noise, "step": torch.randint(0, 1000, (512,))}


def _zoo(name: str, batch: int, seq: int) -> Callable[[int | None], Model]:
    def make(layers: int | None) -> Model:
        model, inputs = load(name, batch=batch, seq=seq, layers=layers)
        return model, dict(inputs)

    return make


MODELS: dict[str, Callable[[int | None], Model]] = {
    "gpt2-xl": _zoo("gpt2-xl", 512, 1024),
    "llama-3-8b": _zoo("llama-3-8b", 512, 4096),
    "llama-3.1-405b": _zoo("llama-3.1-405b", 512, 4096),
    "mixtral-8x7b": _zoo("mixtral-8x7b", 512, 4096),
    "unet": lambda layers: unet(),
}


def measure(name: str, meshes: list[str]) -> Iterator[dict[str, Any]]:
    """One row for every mesh and memory limit."""
    model, inputs = MODELS[name](None)
    graph = capture_graph(model, (), inputs, Options(), Trace(None)).graph
    for label in meshes:
        mesh = Mesh.parse(MESHES[label])
        problem = build(graph, mesh, AnalyticModel(mesh), rules()).problem
        head = {"model": name, "mesh": label, "nodes": len(problem.nodes)}
        head["choices"] = sum(len(node.cost) for node in problem.nodes)
        # With a limit that does not bind, solvers take the lightest of equal choices.
        all_held = sum(max(nbytes) for node in problem.nodes for _, nbytes in node.held)
        roomy = replace(problem, memory_limit=all_held)
        most = evaluate(problem, solve(roomy, time_limit=TIME_LIMIT)).peak
        least = sum(frugal(problem.nodes)[1].values())
        limits = {"none": None, "tight": most - TIGHT * (most - least)}
        for memory, limit in limits.items():
            row = {**head, "memory": memory, "limit_gib": limit and limit / 2**30}
            try:
                found = solve(replace(problem, memory_limit=limit), time_limit=TIME_LIMIT)
            except InfeasibleError:
                yield row | {"verdict": "infeasible"}
                continue
            judged = evaluate(replace(problem, memory_limit=limit), found)
            verdict = "optimal" if found.gap <= 1e-6 else "not proven"
            yield row | {
                "verdict": verdict if judged.feasible else "WRONG",
                "left": found.left,
                "cost_s": found.objective,
                "gap": found.gap,
                "seconds": round(found.seconds, 3),
            }


def compare(name: str, label: str) -> dict[str, Any]:
    """The optimum with eight blocks folded into one, and with eight free to differ."""
    model, inputs = MODELS[name](LAYERS)
    graph = capture_graph(model, (), inputs, Options(), Trace(None)).graph
    mesh = Mesh.parse(MESHES[label])
    prices = AnalyticModel(mesh)
    row: dict[str, Any] = {"model": name, "mesh": label, "layers": LAYERS}
    for kind, taken in (("folded", graph), ("unfolded", replace(graph, repeats=()))):
        problem = build(taken, mesh, prices, rules()).problem
        found = solve(problem, time_limit=TIME_LIMIT)
        row |= {f"{kind}_nodes": len(problem.nodes), f"{kind}_s": found.objective}
        row |= {f"{kind}_gap": found.gap, f"{kind}_seconds": round(found.seconds, 3)}
    return row | {"folded_over_unfolded": row["folded_s"] / row["unfolded_s"] - 1}


def main() -> None:
    """Solve all problems and write results/problems.csv and problems_folded.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--measure", help="solve one model's problems in this process, as JSON")
    parser.add_argument("--compare", nargs=2, help="fold one model on one mesh, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps({"rows": list(measure(options.measure, options.meshes))}))
        return
    if options.compare:
        print(json.dumps(compare(*options.compare)))
        return
    rows: list[dict[str, Any]] = []
    folded: list[dict[str, Any]] = []
    for name in options.models:
        rows += child(__file__, ["--meshes", *options.meshes, "--measure", name])["rows"]
        for mesh in FOLDED_ON if name != "unet" else ():
            folded.append(child(__file__, ["--compare", name, mesh]))
        for row in [*rows, *folded]:
            if row["model"] == name:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [{column: row.get(column) for column in columns} for row in rows]
    print(f"wrote {write('problems', table, keys=KEYS)}")
    print(f"wrote {write('problems_folded', folded, keys=KEYS[:2])}")


if __name__ == "__main__":
    main()

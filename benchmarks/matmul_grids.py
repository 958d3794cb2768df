"""Plans with products on grids of devices: `python benchmarks/matmul_grids.py [CASE...]`.

A stack of perceptrons planned with every linear in one form ("plain" has, along each axis, one
operand whole), in whichever the solver chooses, and in whichever it chooses within little memory:
1.05 times the peak of the form that needs least. Seconds and bytes are simulated: nothing is run.
Writes results/matmul_grids.csv and prints the table of docs/results/planning.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

from autopar import pins
from autopar.errors import InfeasibleError, PinError
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from benchmarks.harness import markdown, write

LAYERS = 4
FORMS = ("plain", "2d", "2.5d", "3d")
LITTLE = 1.05


@dataclass(frozen=True)
class Case:
    """A width, a number of tokens and a mesh."""

    mesh: str
    width: int
    tokens: int


CASES = {
    "plane": Case("H100: r=2, c=2", 16384, 8192),
    "wide plane": Case("H100: r=4 @50GB/s 5us, c=4", 32768, 8192),
    "slow plane": Case("A100-80: r=4 @25GB/s 5us, c=4 @25GB/s 5us", 16384, 16384),
    "layers": Case("H100: d=2, r=4 @50GB/s 5us, c=4", 16384, 8192),
    "cube": Case("H100: d=2, r=2, c=2", 16384, 8192),
    "wide cube": Case("H100: d=4 @50GB/s 5us, r=4 @50GB/s 5us, c=4", 32768, 16384),
}


class Perceptrons(nn.Module):
    """Residual perceptrons of two linears each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last residual."""
        for into, out in zip(self.into, self.out, strict=True):
            x = x + out(torch.relu(into(x)))
        return x.float().square().mean()


def row(name: str, form: str, memory: float | None = None) -> dict[str, Any]:
    """One row: a case in one form, "" for the solver's choice, within so many GiB."""
    case, began = CASES[name], time.perf_counter()
    with torch.device("meta"):
        model = Perceptrons(case.width).bfloat16()
        x = torch.empty(case.tokens, case.width, dtype=torch.bfloat16)
    within = None if memory is None else memory * 2**30
    options = Options(pins=pins.form("*", form) if form else None, memory=within)
    result: dict[str, Any] = {
        "case": name, "mesh": case.mesh, "width": case.width, "tokens": case.tokens,
        "form": form or ("chosen" if memory is None else "chosen, little memory"),
        "memory_gib": "" if memory is None else round(memory, 2),
        "step_seconds": "", "peak_gib": "", "forms": "",
    }  # fmt: skip
    graph = capture_graph(model, (), {"x": x}, options, Trace(None)).graph
    try:
        plan = make_plan(graph, Mesh.parse(case.mesh), options, Trace(None))
    except (InfeasibleError, PinError) as error:
        print(name, form, str(error).splitlines()[0], file=sys.stderr)
        return result | {"planning_s": round(time.perf_counter() - began, 1)}
    used = Counter(
        plan.nodes[graph.template[node.name]].form or "plain"
        for node in graph.nodes
        if node.op == "aten.linear"
    )
    return result | {
        "step_seconds": round(plan.predicted.step_seconds, 4),
        "peak_gib": round(plan.predicted.peak_bytes / 2**30, 2),
        "forms": " ".join(f"{count} {form}" for form, count in sorted(used.items())),
        "planning_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Plans, writes, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    rows = []
    for name in parser.parse_args().cases:
        of = [row(name, form) for form in (*FORMS, "")]
        least = min(r["peak_gib"] for r in of if r["peak_gib"])
        rows += [*of, row(name, "", LITTLE * least)]
        print(*rows[-len(of) - 1 :], sep="\n", flush=True)
    print(f"wrote {write('matmul_grids', rows, keys=('case', 'form'))}")
    heads = ("case", "linears", "s a step", "GiB", "forms")
    picked = ("case", "form", "step_seconds", "peak_gib", "forms")
    print(markdown(heads, [[str(r[key]) for key in picked] for r in rows]))


if __name__ == "__main__":
    main()

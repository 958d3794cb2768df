"""Compares methods of device placement: `python benchmarks/placement.py`, two minutes.

The graphs are those of Mirhoseini et al. (2017) in outline: branches that join again (Inception),
layers unrolled over time (NMT), and two towers. Devices are four GPUs and a slow processor. Seconds
are simulated, in milliseconds. Writes results/placement.csv, placement_curve.csv and
docs/images/placement.svg, the learning curves of ColocRL beside the other methods.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.errors import AutoparError
from autopar.inter_op.placement.methods import methods, place
from autopar.inter_op.placement.placement_problem import PlacementProblem, Task, Transfer
from autopar.planning.learned_placement import Learned, learn
from benchmarks.harness import PICTURES, write

GPUS = 4
SLOWER = 8.0  # the processor, compared with a GPU
STEPS = 120
MIB = 2.0**20


class Drawing:
    """A graph that grows task by task: milliseconds on a GPU, and MiB of each result."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: list[Task] = []
        self.transfers: list[Transfer] = []

    def add(
        self, name: str, cost: float, size: float, *inputs: tuple[int, float]
    ) -> tuple[int, float]:
        """Adds a task that reads others; returns it for its readers."""
        self.tasks.append(Task(name, (*(cost * 1e-3,) * GPUS, cost * 1e-3 * SLOWER), size * MIB))
        here = len(self.tasks) - 1
        self.transfers += [Transfer(v, here, nbytes) for v, nbytes in inputs]
        return here, size * MIB

    def problem(self) -> PlacementProblem:
        """The graph on four GPUs and a processor, which PCIe connects."""
        count = GPUS + 1
        return PlacementProblem(
            self.name,
            tuple(self.tasks),
            tuple(self.transfers),
            np.full((count, count), 20e-6),
            np.full((count, count), 12e9),
        )


def inception(blocks: int = 6) -> PlacementProblem:
    """Blocks of four branches of unlike lengths, joined by a concatenation."""
    graph = Drawing("inception")
    last = graph.add("stem", 3.0, 8.0)
    for b in range(blocks):
        ends = []
        for k, lengths in enumerate(((1.0,), (0.7, 2.0), (0.7, 1.5, 1.5), (0.4, 0.8))):
            at = last
            for j, cost in enumerate(lengths):
                at = graph.add(f"b{b}.{k}.{j}", cost, 2.0, at)
            ends.append(at)
        last = graph.add(f"b{b}.join", 0.2, 8.0, *ends)
    graph.add("head", 1.0, 0.1, last)
    return graph.problem()


def nmt(layers: int = 4, steps: int = 8) -> PlacementProblem:
    """LSTM cells of layers and time steps, with attention and a softmax at every step."""
    graph = Drawing("nmt")
    cells: dict[tuple[int, int], tuple[int, float]] = {}
    for t in range(steps):
        below = graph.add(f"embed{t}", 0.1, 0.5)
        for k in range(layers):
            before = [cells[k, t - 1]] if t else []
            below = cells[k, t] = graph.add(f"cell{k}.{t}", 1.0, 0.5, below, *before)
        attended = graph.add(f"attention{t}", 0.6, 0.5, below)
        graph.add(f"softmax{t}", 2.0, 0.1, attended)
    return graph.problem()


def towers(length: int = 12) -> PlacementProblem:
    """Returns two towers of unequal work that a product joins."""
    graph = Drawing("two towers")
    ends = []
    for name, cost in (("image", 2.0), ("text", 1.4)):
        at = graph.add(f"{name}.in", 0.1, 1.0)
        for k in range(length):
            at = graph.add(f"{name}{k}", cost, 4.0, at)
        ends.append(at)
    graph.add("product", 0.5, 0.1, *ends)
    return graph.problem()


def main() -> None:
    """Runs all methods on all graphs; writes the tables and the picture."""
    torch.set_num_threads(1)  # steps of an LSTM are too small for more
    rows: list[dict[str, Any]] = []
    curves: dict[str, Learned] = {}
    for problem in (inception(), nmt(), towers()):
        for method in (*methods(), "colocrl"):
            began = time.perf_counter()
            row: dict[str, Any] = {"graph": problem.name, "method": method}
            try:
                if method == "colocrl":
                    curves[problem.name] = learn(problem, steps=STEPS)
                    placed = curves[problem.name].placed
                else:
                    placed = place(problem, method, time_limit=30.0)
                row |= {"ms": 1e3 * placed.seconds, "devices": len(set(placed.devices))}
            except AutoparError as error:
                row |= {"error": error.what}
            row["search_s"] = round(time.perf_counter() - began, 2)
            print(row, flush=True)
            rows.append(row)
    columns = ("graph", "method", "ms", "devices", "search_s", "error")
    print(f"wrote {write('placement', [{c: row.get(c) for c in columns} for row in rows])}")
    points = [
        {"graph": name, "step": k, "mean_ms": 1e3 * mean, "best_ms": 1e3 * best}
        for name, learned in curves.items()
        for k, (mean, best) in enumerate(zip(learned.mean, learned.best, strict=True))
    ]
    print(f"wrote {write('placement_curve', points)}")
    print(f"wrote {drawn(rows, curves)}")


def drawn(rows: list[dict[str, Any]], curves: dict[str, Learned]) -> Path:
    """Draws the learning curves, with the other methods as lines; returns the picture's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(curves), 3.5), layout="constrained")
    for k, (name, learned) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), k + 1)
        axes.plot([1e3 * s for s in learned.mean], label="colocrl, mean", color="C0", alpha=0.4)
        axes.plot([1e3 * s for s in learned.best], label="colocrl, best", color="C0")
        others = [r for r in rows if r["graph"] == name and r["method"] != "colocrl" and "ms" in r]
        for colour, row in enumerate(others, 1):
            axes.axhline(row["ms"], color=f"C{colour}", label=row["method"], linestyle="--")
        axes.set(title=name, xlabel="step of REINFORCE", ylabel="ms", yscale="log")
        axes.legend(fontsize="small")
    path = PICTURES / "placement.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


if __name__ == "__main__":
    main()

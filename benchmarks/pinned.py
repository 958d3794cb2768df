"""Predicts step time and memory under pins: `python benchmarks/pinned.py`.

It plans one model on one cluster without pins and with published plans, for a table in docs/how-to.
Nothing runs; all figures are predictions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import pins
from autopar.errors import InfeasibleError
from autopar.intra_op.pins.pin_functions import PinsLike
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.zoo import load
from benchmarks.harness import write

MESH = "H100: node=2, gpu=4"
MODEL, BATCH, SEQ = "llama-3-8b", 16, 2048
NAMED = {"batch": "node", "heads": "gpu", "ffn": "gpu", "vocab": "gpu"}
WORDS: dict[str, PinsLike | None] = {
    "": None,
    "--pins data_parallel:node --pins megatron_sp:gpu": [
        pins.data_parallel("node"),
        pins.megatron_sp("gpu"),
    ],
    " ".join(f"--layout {name}={axis}" for name, axis in NAMED.items()): autopar.layout(NAMED),
    "--pins fsdp": pins.fsdp(),
    "--pins data_parallel:node --pins megatron:gpu": [
        pins.data_parallel("node"),
        pins.megatron("gpu"),
    ],
    "--pins data_parallel": pins.data_parallel(),
}


def main() -> None:
    """Plans with all pins and writes results/pinned.csv."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    model, inputs = load(MODEL, batch=BATCH, seq=SEQ)
    graph = capture_graph(model, (), inputs, Options(), Trace(None)).graph
    rows: list[dict[str, Any]] = []
    for options, words in WORDS.items():
        row: dict[str, Any] = {"model": MODEL, "batch": BATCH, "seq": SEQ, "mesh": MESH}
        row |= {"options": options, "step_ms": None, "memory_gib": None, "refused": ""}
        try:
            made = make_plan(graph, Mesh.parse(MESH), Options(pins=words), Trace(None)).predicted
            row["step_ms"] = round(made.step_seconds * 1e3, 1)
            row["memory_gib"] = round(made.peak_bytes / 2**30, 1)
        except InfeasibleError as error:
            row["refused"] = error.why
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    print(f"wrote {write('pinned', rows)}")


if __name__ == "__main__":
    main()

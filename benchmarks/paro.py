"""Plans of PaRO's state shardings with the collectives of each ring algorithm, simulated.

A Llama of 7B on 128 A100 in 16 nodes, eight microbatches, parameters gathered again for the
backward, on PaRO's network as `benchmarks/published/rings.py` fits it to the three published times
of all_gathers (arXiv:2310.06003: 288, 183 and 162 ms). Every gather and reduction of parameters and
gradients goes by one algorithm; "library" is NCCL's own call, "auto" the cheapest by price. No GPU
takes part: these are the planner's predictions. Rows go to results/paro_plans.csv.

    python -m benchmarks.paro
"""

from __future__ import annotations

from typing import Any

import autopar
from autopar.pins import data_parallel
from autopar.zoo import load
from benchmarks.harness import write
from benchmarks.published import rings

STATES = ("zero1", "zero3 over none, gathered again", "paro-iig over node, gathered again")
ALGORITHMS = ("library", "flat_ring", "h_ring", "ho_ring", "auto")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
AXES = ("node, gpu", "node", "gpu")


def mesh() -> str:
    """PaRO's cluster as text."""
    node, gpu = rings.levels()
    links = (
        f"{axis}={level.size} @{level.bandwidth / 1e9:.3f}GB/s {1e6 * level.latency:.3f}us"
        for axis, level in (("node", node), ("gpu", gpu))
    )
    return f"A100-80: {', '.join(links)}"


def rows_of(name: str) -> list[str] | str | None:
    """Returns the rows of `collectives=` for an algorithm."""
    if name in ("auto", "library"):
        return "auto" if name == "auto" else None
    return [f"{kind} over {axes} from 0: {name}" for kind in KINDS for axes in AXES]


def main() -> None:
    """Plans and writes."""
    model, inputs = load("llama-7b", batch=1024, seq=512)
    rows: list[dict[str, Any]] = []
    for state in STATES:
        for name in ALGORITHMS:
            plan = autopar.plan(
                model, mesh(), example_inputs=inputs, pins=data_parallel(), state=state,
                collectives=rows_of(name), recompute="full", microbatches=8,
            )  # fmt: skip
            said = plan.predicted
            rows.append(
                {"state": state, "collectives": name, "step_s": round(said.step_seconds, 4),
                 "peak_GB": round(said.peak_bytes / 1e9, 2)}
            )  # fmt: skip
            print(rows[-1], flush=True)
    print(write("paro_plans", rows))


if __name__ == "__main__":
    main()

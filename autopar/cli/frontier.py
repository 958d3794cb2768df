"""Output of `autopar plan --frontier`: step time against memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from autopar.ir.units import format_bytes, format_seconds
from autopar.stage_plan import StagePlan

WIDTH = 30  # of the longest bar, in characters


def render(plans: Sequence[StagePlan]) -> Table:
    """Renders a table with a row for each plan; `plans` lists the fastest first."""
    table = Table(title="Step time against memory per device (predicted)", title_justify="left")
    for name in ("memory", "a step", ""):
        table.add_column(name, justify="right")
    table.add_column("recomputed blocks")
    table.add_column("step time")
    fastest, slowest = (plans[at].predicted.step_seconds for at in (0, -1))
    for plan in plans:
        seconds = plan.predicted.step_seconds
        table.add_row(
            format_bytes(plan.predicted.peak_bytes),
            format_seconds(seconds),
            f"{seconds / fastest:.2f}x",
            ", ".join(f"{run} {how}" for run, how in plan.recompute.items()),
            "█" * max(round(WIDTH * seconds / slowest), 1),
        )
    return table


def to_json(plans: Sequence[StagePlan]) -> list[dict[str, object]]:
    """Returns a dictionary for each plan: bytes, seconds and recomputed blocks."""
    return [
        {
            "peak_bytes": plan.predicted.peak_bytes,
            "step_seconds": plan.predicted.step_seconds,
            "recompute": {run: str(how) for run, how in plan.recompute.items()},
        }
        for plan in plans
    ]

"""Prices the sums of gradients of a pipeline's step with a flush.

A device begins to sum the gradients of a stage in that stage's last backward, on a stream of its
own, and waits for all sums at the end of its row (`runtime/parameters/gradients.py`). If it holds
several stages, the sums of one therefore also run beside the last backwards of the others, as those
of Megatron-LM's interleaved stages do.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedule_time import StageCost
from autopar.ir.action import Row


def waited_sums(
    schedule: Schedule,
    costs: Sequence[StageCost],
    sums: Sequence[float],
    slowdowns: Sequence[float],
) -> list[float]:
    """Returns for each stage the seconds by which the sums of gradients prolong a step.

    Those of a rank count for the stage whose last backward is the rank's last one.

    Args:
        schedule: schedule of the pipeline, with a flush.
        costs: costs of each stage's actions.
        sums: seconds of the sums of each stage's gradients, if nothing else runs.
        slowdowns: factor by which kernels and collectives slow down while both run, for each stage.
    """
    waited = [0.0] * schedule.stages
    for row in schedule.rows:
        last = _last_backwards(row)
        left = more = 0.0
        for place, action in enumerate(row):
            stage = action.stage
            left += sums[stage] if last[stage] == place else 0.0
            both = min(_seconds(costs[stage], action.kind), left)
            left -= both
            more += (slowdowns[stage] - 1) * both
        if last:
            final = max(last, key=last.__getitem__)
            waited[final] = max(waited[final], left + more)
    return waited


def _last_backwards(row: Row) -> dict[int, int]:
    """Returns the place of the last backward of each stage in a rank's row."""
    return {action.stage: place for place, action in enumerate(row) if action.kind in ("B", "W")}


def _seconds(cost: StageCost, kind: str) -> float:
    """Returns the seconds of a computation."""
    parts = {"F": cost.forward, "B": cost.input + cost.weight, "I": cost.input, "W": cost.weight}
    return parts[kind]

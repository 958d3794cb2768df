"""Rows of schedules that never run dry: a forward and an earlier microbatch's backward in turns."""

from __future__ import annotations

from collections.abc import Callable

from autopar.inter_op.schedule import Times
from autopar.ir.action import UPDATE, Action, Row

STALE = "stale gradients"
Ages = Callable[[int], int]  # place of a turn in the period -> age of the weights


def row(
    stage: int,
    microbatches: int,
    behind: int,
    every: int,
    forward: Ages = lambda turn: 0,
    backward: Ages = lambda turn: 0,
) -> Row:
    """Returns the row of one period.

    Args:
        stage: number of the stage.
        microbatches: in a period, a multiple of `every`.
        behind: how many microbatches the backward of a turn is behind its forward.
        every: microbatches whose gradients an update takes; it follows the last one's backward.
        forward, backward: how old the weights are that they run on.
    """
    actions: list[Action] = []
    for turn in range(microbatches):
        batch = turn - behind
        actions.append(Action("F", stage, turn, age=forward(turn)))
        actions.append(Action("B", stage, batch, age=backward(turn)))
        if (batch + 1) % every == 0:
            actions.append(Action(UPDATE, stage, batch))
    return tuple(actions)


def stale(behind: int, every: int) -> int:
    """Returns by how many updates the newest weights are ahead of a backward's forward, at most."""
    return -(-behind // every)


def periods(behind: int, microbatches: int) -> int:
    """Returns after how many periods all of a row's microbatches are there."""
    return -(-behind // microbatches)


def bubble(times: Times) -> float:
    """Returns 0: in the steady state every rank has a forward or a backward to do."""
    return 0.0

"""Rows of schedules that never drain: forwards alternate with backwards of earlier microbatches."""

from __future__ import annotations

from collections.abc import Callable

from autopar.inter_op.schedule import Times
from autopar.ir.action import UPDATE, Action, Row

STALE = "stale gradients"
Ages = Callable[[int], int]  # position of a turn in the period -> age of the weights


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
        stage: index of the stage.
        microbatches: number per period, a multiple of `every`.
        behind: number of microbatches by which the backward of a turn lags its forward.
        every: microbatches per update, which follows the backward of the last one.
        forward, backward: ages of the weights that they use.
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
    """Returns the maximum number of updates between a forward and its backward."""
    return -(-behind // every)


def periods(behind: int, microbatches: int) -> int:
    """Returns the number of periods until all of a row's microbatches are in flight."""
    return -(-behind // microbatches)


def bubble(times: Times) -> float:
    """Returns 0: in the steady state every rank always has a forward or a backward to run."""
    return 0.0

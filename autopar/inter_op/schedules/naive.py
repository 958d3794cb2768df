"""Naive: one microbatch after another, so that one rank works at a time; a baseline."""

from __future__ import annotations

from functools import partial

from autopar.inter_op.schedule import Rows, Schedule, Times, check_sizes, fraction, line
from autopar.ir.action import Action

NAME = "naive"
NEEDS = "any sizes"


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns rows that alternate a forward and its backward, with one microbatch in flight.

    Raises:
        ScheduleError: there is no rank or no microbatch.
    """
    check_sizes(NAME, ranks, microbatches)
    rows = Rows(
        lambda: [
            tuple(Action(kind, rank, batch) for batch in range(microbatches) for kind in "FB")
            for rank in range(ranks)
        ]
    )
    closed = partial(bubble, ranks)
    return Schedule(NAME, ranks, microbatches, rows, line(ranks), (1,) * ranks, closed)


def bubble(ranks: int, times: Times) -> float:
    """Returns (D-1)/D."""
    return fraction((ranks - 1) * times.total, times.total)

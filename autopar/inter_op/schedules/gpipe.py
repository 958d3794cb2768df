"""GPipe: all forwards, then all backwards (arXiv:1811.06965)."""

from __future__ import annotations

from functools import partial

from autopar.inter_op.schedule import Rows, Schedule, Times, check_sizes, fraction, line
from autopar.ir.action import Action

NAME = "gpipe"
NEEDS = "any sizes"


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns the rows of GPipe, which keeps the activations of all microbatches.

    Raises:
        ScheduleError: there is no rank or no microbatch.
    """
    check_sizes(NAME, ranks, microbatches)
    rows = Rows(
        lambda: [
            tuple(Action(kind, rank, batch) for kind in "FB" for batch in range(microbatches))
            for rank in range(ranks)
        ]
    )
    in_flight = (microbatches,) * ranks
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, ranks, microbatches, rows, line(ranks), in_flight, closed)


def bubble(ranks: int, microbatches: int, times: Times) -> float:
    """Returns (D-1)/(D-1+N): filling and draining cost the time of D - 1 microbatches."""
    return fraction((ranks - 1) * times.total, microbatches * times.total)

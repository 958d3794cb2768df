"""1F1B: every backward as soon as it can run (DAPPLE, arXiv:2007.01045; PipeDream-Flush)."""

from __future__ import annotations

from functools import partial

from autopar.inter_op.schedule import Row, Rows, Schedule, Times, check_sizes, fraction, line
from autopar.ir.action import Action

NAME = "1f1b"
NEEDS = "any sizes"
CANDIDATES = ("",)


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns the rows of 1F1B: as fast as GPipe, with at most D - rank microbatches in flight.

    Raises:
        ScheduleError: there is no rank or no microbatch.
    """
    check_sizes(NAME, ranks, microbatches)
    in_flight = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    rows = Rows(lambda: [row(rank, microbatches, in_flight[rank] - 1) for rank in range(ranks)])
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, ranks, microbatches, rows, line(ranks), in_flight, closed)


def row(stage: int, microbatches: int, warm_up: int) -> Row:
    """Returns `warm_up` forwards, alternating forwards and backwards, and remaining backwards."""
    forwards = [Action("F", stage, batch) for batch in range(microbatches)]
    backwards = [Action("B", stage, batch) for batch in range(microbatches)]
    turns = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return (*forwards[:warm_up], *turns, *backwards[microbatches - warm_up :])


def bubble(ranks: int, microbatches: int, times: Times) -> float:
    """Returns (D-1)/(D-1+N), as GPipe: reordering the backwards does not change the step time."""
    return fraction((ranks - 1) * times.total, microbatches * times.total)

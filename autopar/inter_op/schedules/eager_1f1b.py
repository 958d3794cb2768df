"""Eager 1F1B: 1F1B with more forwards ahead, so that transfers hide behind them.

Where a transfer takes time, the first gradient comes back to a rank later by two transfers for each
rank behind it, and 1F1B waits for it with nothing left to do. One more forward for each of these
ranks is DAPPLE's second policy (arXiv:2007.01045) and Eager-1F1B (arXiv:2211.05322); as long as a
transfer takes at most half of a microbatch's time on a rank, it is enough.
"""

from __future__ import annotations

from functools import partial

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules.one_f_one_b import bubble, row

NAME = "eager_1f1b"
NEEDS = "any sizes"


def schedule(ranks: int, microbatches: int, extra: int = 1) -> Schedule:
    """Returns the rows of 1F1B, with `extra` more forwards ahead for each rank behind the own one.

    The bubble is that of 1F1B where transfers take no time.

    Raises:
        ScheduleError: there is no rank or no microbatch, or `extra` is negative.
    """
    check_sizes(NAME, ranks, microbatches)
    if extra < 0:
        raise ScheduleError(
            f"{NAME}: {extra} extra microbatches",
            why="fewer forwards ahead than 1F1B has would leave ranks idle",
            todo="give 0, which is 1F1B, or more",
        )
    behind = [ranks - 1 - rank for rank in range(ranks)]
    in_flight = tuple(min(1 + (1 + extra) * count, microbatches) for count in behind)
    rows = Rows(lambda: [row(rank, microbatches, in_flight[rank] - 1) for rank in range(ranks)])
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, ranks, microbatches, rows, line(ranks), in_flight, closed)

"""Eager 1F1B: 1F1B with more forwards ahead, so that transfers hide behind them.

If transfers take time, the first gradient returns to a rank later by two transfers per rank behind
it, and 1F1B idles until then. One more forward for each of these ranks hides the delay, as in
DAPPLE's second policy (arXiv:2007.01045) and Eager-1F1B (arXiv:2211.05322). This suffices as long
as a transfer takes at most half of a microbatch's time on a rank.
"""

from __future__ import annotations

from functools import partial

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules.one_f_one_b import bubble, row

NAME = "eager_1f1b"
NEEDS = "any sizes"


def schedule(ranks: int, microbatches: int, extra: int = 1) -> Schedule:
    """Returns the rows of 1F1B with `extra` additional early forwards per rank behind the own one.

    Without transfer time the bubble equals that of 1F1B.

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

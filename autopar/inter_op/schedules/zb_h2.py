"""ZB-H2: no bubble between a rank's first and last action, for twice the memory of 1F1B.

The handcrafted schedule from arXiv:2401.10241, section 2.2, also known as ZB2P. The ranks start and
finish one after another: the bubble is zero if the next step starts on a rank before others have
finished. With a barrier between steps the bubble equals that of ZB-H1.
"""

from __future__ import annotations

from functools import partial

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, Times, check_sizes, fraction, line
from autopar.inter_op.schedules._split import row

NAME = "zb_h2"
NEEDS = "at least 2D - 1 microbatches on D ranks"


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns the rows of ZB-H2, where rank r delays its weight backwards by 2r microbatches.

    Raises:
        ScheduleError: there is no rank, or there are fewer than 2D - 1 microbatches.
    """
    check_sizes(NAME, ranks, microbatches)
    if microbatches < 2 * ranks - 1:
        raise ScheduleError(
            f"{NAME}: {microbatches} microbatches on {ranks} ranks",
            why=f"the first rank runs {2 * ranks - 1} forwards before its first backward",
            todo=f"use {2 * ranks - 1} microbatches or more, or zb_h1, which takes any number",
        )
    rows = Rows(
        lambda: [row(rank, microbatches, 2 * (ranks - 1 - rank), 2 * rank) for rank in range(ranks)]
    )
    in_flight = (2 * ranks - 1,) * ranks
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, ranks, microbatches, rows, line(ranks), in_flight, closed, joined=True)


def bubble(ranks: int, microbatches: int, times: Times) -> float | None:
    """Returns the fraction of (D-1) (T_F + T_B - 2 T_W) idle seconds (Table 2).

    It holds for weight backwards that take no longer than forwards and input backwards; returns
    None otherwise.
    """
    if times.weight > min(times.forward, times.input):
        return None
    idle = (ranks - 1) * (times.forward + times.input - 2 * times.weight)
    return fraction(idle, microbatches * times.total)

"""ZB-H1: 1F1B's memory and a third of its bubble, by weight backwards that fill the end.

The handcrafted schedule from arXiv:2401.10241, section 2.1, also known as ZB1P.
"""

from __future__ import annotations

from functools import partial

from autopar.inter_op.schedule import Rows, Schedule, Times, check_sizes, fraction, line
from autopar.inter_op.schedules._split import row

NAME = "zb_h1"
NEEDS = "any sizes"
CANDIDATES = ("",)


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns the rows of ZB-H1, where rank r delays its weight backwards by r microbatches.

    Raises:
        ScheduleError: there is no rank or no microbatch.
    """
    check_sizes(NAME, ranks, microbatches)
    rows = Rows(
        lambda: [
            row(rank, microbatches, min(ranks - 1 - rank, microbatches), rank)
            for rank in range(ranks)
        ]
    )
    in_flight = (min(ranks, microbatches),) * ranks
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, ranks, microbatches, rows, line(ranks), in_flight, closed)


def bubble(ranks: int, microbatches: int, times: Times) -> float | None:
    """Returns the fraction of (D-1) (T_F + T_B - T_W) idle seconds (Table 2).

    It holds for at least D microbatches and for weight backwards that take no longer than the
    forwards and input backwards, whose gaps they fill. For fewer microbatches and equal times T, a
    rank waits 2 (D-1) T for the others and fills part of it with N-1 weight backwards. Returns None
    otherwise.
    """
    if microbatches >= ranks and times.weight <= min(times.forward, times.input):
        idle = (ranks - 1) * (times.forward + times.input - times.weight)
    elif microbatches < ranks and len(set(times)) == 1:
        idle = (2 * (ranks - 1) - (microbatches - 1)) * times.weight
    else:
        return None
    return fraction(idle, microbatches * times.total)

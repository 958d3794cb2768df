"""ZB-V: two stages a rank in a V, no bubble between a rank's first and last action, 1F1B's memory.

arXiv:2401.10241, section 6. The V lets all ranks start their backwards at about the same time, so
that all of them have the same number of activations in flight. The ranks start one after another:
the bubble is zero if the next step starts on a rank before others have finished.
"""

from __future__ import annotations

from functools import partial

from autopar.inter_op.schedule import Row, Rows, Schedule, Times, check_sizes, vee
from autopar.inter_op.schedules._writer import Writer

NAME = "zb_v"
NEEDS = "any sizes; two stages a rank"
CANDIDATES = ("",)


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns the rows of ZB-V, with stages r and 2D-1-r on rank r.

    Fewer than 2D - 1 microbatches do not fill the pipeline; their rows are those for 2D - 1
    microbatches with the missing ones removed.

    Raises:
        ScheduleError: there is no rank or no microbatch.
    """
    check_sizes(NAME, ranks, microbatches)
    full = max(microbatches, 2 * ranks - 1)
    rows = Rows(
        lambda: [
            tuple(one for one in _row(rank, ranks, full) if one.microbatch < microbatches)
            for rank in range(ranks)
        ]
    )
    in_flight = (min(2 * ranks, 2 * microbatches),) * ranks
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, 2 * ranks, microbatches, rows, vee(ranks), in_flight, closed, joined=True)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    there, back = rank, 2 * ranks - 1 - rank
    write = Writer()
    for _ in range(2 * (ranks - rank) - 1):
        write.forward(there)
    for _ in range(rank):
        write.forward(back)
        write.forward(there)
    for _ in range(ranks - rank):
        write.forward(back)
        write.input(back)
        write.weight()
    for turn in range(ranks, microbatches):
        if turn <= microbatches - ranks + rank:
            write.forward(there)
        write.input(there)
        write.weight()
        write.forward(back)
        write.input(back)
        write.weight()
    for _ in range(rank):
        write.input(there)
        write.input(back)
    for _ in range(ranks - rank):
        write.input(there)
        write.weight(there)
    while write.pending:
        write.weight(max(one.stage for one in write.pending))
    return tuple(write.row)


def bubble(ranks: int, microbatches: int, times: Times) -> float | None:
    """Returns 0, published for equal times of F, I and W and enough microbatches to fill the V."""
    if microbatches < 2 * ranks - 1 or len(set(times)) > 1:
        return None
    return 0.0

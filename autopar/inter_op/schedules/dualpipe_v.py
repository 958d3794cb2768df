"""DualPipeV: two stages a rank in a V, forwards and backwards in pairs that may overlap.

One half of DeepSeek-V3's symmetric DualPipe (arXiv:2412.19437, section 3.2.1): "cut in half", it
needs only one copy of the model and half of the ranks. While the pipeline is full, every forward of
one stage is paired with a backward of the other, so that the communication of one can overlap with
the computation of the other.
"""

from __future__ import annotations

from functools import partial

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Row, Rows, Schedule, Times, check_sizes, fraction, vee
from autopar.inter_op.schedules._writer import Writer

NAME = "dualpipe_v"
NEEDS = "at least 2D microbatches on D ranks; two stages a rank"


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns the rows of DualPipeV, with stages r and 2D-1-r on rank r.

    Raises:
        ScheduleError: there is no rank, or there are fewer microbatches than stages.
    """
    check_sizes(NAME, ranks, microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"{NAME}: {microbatches} microbatches on {ranks} ranks",
            why=f"the V of {2 * ranks} stages is full with as many microbatches",
            todo=f"use {2 * ranks} microbatches or more, or zb_v, which takes any number",
        )
    rows = Rows(lambda: [_row(rank, ranks, microbatches) for rank in range(ranks)])
    in_flight = tuple(2 * ranks + 1 for rank in range(ranks))
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, 2 * ranks, microbatches, rows, vee(ranks), in_flight, closed)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    there, back, behind = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    write = Writer()
    for _ in range(2 * behind):
        write.forward(there)
    for _ in range(rank + 1):
        write.forward(there)
        write.forward(back)
    for _ in range(behind):  # the V is not full yet: input backwards first
        write.input(back)
        write.weight()
        write.forward(back)
    for _ in range(microbatches - ranks - behind):
        write.forward(there)
        write.backward(back)
        write.forward(back)
        write.backward(there)
    for _ in range(behind):
        write.backward(back)
        write.forward(back)
        write.backward(there)
    for turn in range(rank + 1):  # splits the second half of the remaining backwards
        _last(write, back, late=2 * turn > rank)
        _last(write, there, late=2 * turn + 1 > rank)
    for _ in range(behind):
        if write.pending:
            write.weight()
        write.input(there)
    while write.pending:
        write.weight()
    return tuple(write.row)


def _last(write: Writer, stage: int, late: bool) -> None:
    if late:
        write.input(stage)
    else:
        write.backward(stage)


def bubble(ranks: int, microbatches: int, times: Times) -> float | None:
    """Returns the fraction of (D-1) (F + max(0, I - W)) idle seconds.

    It holds for rows that run sequentially as written, where a forward takes at least as long as an
    input backward and at most as long as a whole one; returns None otherwise. `published` is
    DeepSeek's own formula.
    """
    if not times.input <= times.forward <= times.input + times.weight:
        return None
    idle = (ranks - 1) * (times.forward + max(0.0, times.input - times.weight))
    return fraction(idle, 2 * microbatches * times.total)


def published(ranks: int, times: Times, together: float) -> float:
    """Returns (D-1) (F&B + B - 3W), the idle seconds per rank as published by DeepSeek.

    It treats a forward and its paired backward as one block F&B, whose results are available at the
    end of the block.

    Args:
        ranks: D, half of the number of stages.
        times: times of one stage; B is the whole backward.
        together: seconds per block, F + B without overlap.
    """
    return (ranks - 1) * (together + times.input - 2 * times.weight)

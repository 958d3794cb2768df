"""PipeDream-2BW: no flush, gradients of m microbatches added up, two versions of the weights.

arXiv:2006.09503, section 3.1. All stages run all microbatches of a batch on one version, which is
one update older than the newest; m is at least the number of stages:

    W(t+1) = W(t) - lr grad f(W(t-1))

PipeDream-Flush from the same paper is the schedule 1f1b.
"""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules._streaming import STALE, bubble, row

NAME = "2bw"
NEEDS = "at least as many microbatches as ranks; two versions of the weights"
ALLOW = STALE
CANDIDATES = ("",)


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns one period of the steady state: a batch of m microbatches and its update.

    Rank r runs its backwards p - 1 - r microbatches late. The last backwards of a batch and its
    update therefore follow the first forwards of the next batch.

    Raises:
        ScheduleError: there is no rank, or there are fewer microbatches than ranks.
    """
    check_sizes(NAME, ranks, microbatches)
    if microbatches < ranks:
        raise ScheduleError(
            f"{NAME}: {microbatches} microbatches on {ranks} ranks",
            why="an update would come after more than one batch has begun: with fewer microbatches"
            " than stages two versions are not enough",
            todo=f"use {ranks} microbatches or more, or pipedream, which takes any number",
        )
    behind = [ranks - 1 - rank for rank in range(ranks)]
    rows = Rows(
        lambda: [
            row(
                rank, microbatches, behind[rank], microbatches,
                lambda turn, late=behind[rank]: int(turn >= late),  # type: ignore[misc]
                lambda turn: 1,
            )
            for rank in range(ranks)
        ]
    )  # fmt: skip
    in_flight = tuple(count + 1 for count in behind)
    return Schedule(
        NAME, ranks, microbatches, rows, line(ranks), in_flight, bubble, flushes=False,
        warm_up=2, versions=(2,) * ranks, staleness=(1,) * ranks,
    )  # fmt: skip

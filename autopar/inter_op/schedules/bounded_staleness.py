"""Bounded staleness for the data axis: sums of gradients arrive some steps later, 1F1B otherwise.

After Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"
(NeurIPS 2013): a worker may be at most s steps ahead of the slowest. Here the replicas of a stage
start summing the gradients of a step at its end, and wait for the sums of s steps earlier:

    W(t+1) = W(t) - lr sum over replicas of grad f(W(t-s))

In the paper a worker sees its own updates immediately and those of others when they arrive. Here
all replicas apply the same update at the same step, so that they stay equal and runs are
reproducible. The sums overlap with s steps. There is no other synchronisation: each replica keeps
its part of the loss, which is summed with the report of the step and read s steps later. A replica
can therefore be up to s steps ahead. The bubble is that of 1F1B: the first stage begins a step once
it has run all backwards of the one before.
"""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Row, Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules import one_f_one_b
from autopar.inter_op.schedules._streaming import STALE
from autopar.ir.action import SYNC_AWAIT, SYNC_BEGIN, UPDATE, Action

NAME = "bounded_staleness"
NEEDS = "any sizes; sums of gradients of `ahead` steps under way"
ALLOW = STALE
CANDIDATES = ("",)


def schedule(ranks: int, microbatches: int, ahead: int = 1, outer: int = 0) -> Schedule:
    """Returns one step: 1F1B, with an update from the gradients of `ahead` steps earlier.

    Args:
        ranks, microbatches: sizes.
        ahead: steps that a replica may be ahead.
        outer: number of outermost axes of a stage's mesh along which replicas may be ahead, such as
            1 for hosts; over the others they sum at the end of every step. 0 for all axes.

    Raises:
        ScheduleError: there is no rank or no microbatch, or `ahead` is less than 1.
    """
    check_sizes(NAME, ranks, microbatches)
    if ahead < 1:
        raise ScheduleError(
            f"{NAME}: {ahead} steps ahead",
            why="ranks that may not be ahead wait for one another in every step",
            todo="use 1 or more, or 1f1b",
        )
    exact = one_f_one_b.schedule(ranks, microbatches)
    rows = Rows(lambda: [_row(n, row, microbatches, ahead) for n, row in enumerate(exact.rows)])
    return Schedule(
        NAME, ranks, microbatches, rows, line(ranks), exact.in_flight, exact.bubble,
        flushes=False, warm_up=ahead,
        versions=(1,) * ranks, staleness=(ahead,) * ranks, pending=ahead, outer=outer,
    )  # fmt: skip


def _row(stage: int, computed: Row, microbatches: int, ahead: int) -> Row:
    last = microbatches - 1
    before = last - ahead * microbatches
    sums = Action(SYNC_BEGIN, stage, last), Action(SYNC_AWAIT, stage, before)
    return (*computed, *sums, Action(UPDATE, stage, before))

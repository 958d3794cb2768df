"""Interleaved 1F1B: several stages per rank, assigned round-robin, for a smaller bubble.

Megatron-LM's second schedule (arXiv:2104.04473, section 2.2). A rank runs a round of microbatches
through its first stage, then through its second, and so on. In the paper a round has as many
microbatches as there are ranks; here, as in torch, the rounds may be larger if all are equal.
"""

from __future__ import annotations

from functools import partial

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Row, Rows, Schedule, Times, check_sizes, fraction, loop
from autopar.ir.action import Action

NAME = "interleaved_1f1b"
NEEDS = "two or more chunks; microbatches in equal rounds of as many as there are ranks, or more"
CANDIDATES = tuple(f"chunks={count}" for count in (2, 3, 4, 6, 8, 12, 16))


def schedule(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Returns the rows of interleaved 1F1B with `chunks` stages a rank: `ranks * chunks` stages.

    Raises:
        ScheduleError: there is no rank or no microbatch; there are fewer than two chunks; the
            microbatches do not divide into equal rounds.
    """
    check_sizes(NAME, ranks, microbatches)
    if chunks < 2:
        raise ScheduleError(
            f"{NAME}: {chunks} chunks",
            why="with one stage a rank there is nothing to interleave",
            todo="use 1f1b, or two chunks or more",
        )
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ScheduleError(
            f"{NAME}: {microbatches} microbatches do not make equal rounds on {ranks} ranks",
            why=f"{rounds} rounds fit, and {microbatches} is not a multiple of {rounds}",
            todo=f"use {microbatches - microbatches % ranks} or "
            f"{microbatches - microbatches % ranks + ranks} microbatches",
        )
    size = microbatches // rounds
    total = chunks * microbatches
    ahead = [(chunks - 1) * size + 2 * (ranks - 1 - rank) for rank in range(ranks)]
    warm_up = [min(count, total) for count in ahead]
    rows = Rows(
        lambda: [
            _row(rank, ranks, microbatches, chunks, size, warm_up[rank]) for rank in range(ranks)
        ]
    )
    in_flight = tuple(min(count + 1, total) for count in ahead)
    closed = partial(bubble, ranks, microbatches, chunks)
    return Schedule(
        NAME, ranks * chunks, microbatches, rows, loop(ranks, chunks), in_flight, closed
    )


def _row(rank: int, ranks: int, microbatches: int, chunks: int, size: int, warm_up: int) -> Row:
    """Builds a row: `warm_up` forwards, alternating forwards and backwards, remaining backwards."""
    order = [
        (chunk, first + number)
        for first in range(0, microbatches, size)
        for chunk in range(chunks)
        for number in range(size)
    ]
    forwards = [Action("F", chunk * ranks + rank, batch) for chunk, batch in order]
    backwards = [Action("B", (chunks - 1 - chunk) * ranks + rank, batch) for chunk, batch in order]
    turns = zip(forwards[warm_up:], backwards, strict=False)
    return (
        *forwards[:warm_up],
        *(action for pair in turns for action in pair),
        *backwards[len(order) - warm_up :],
    )


def bubble(ranks: int, microbatches: int, chunks: int, times: Times) -> float | None:
    """Returns (D-1)/(D-1+vN) for v chunks: idle time is D-1 chunks, busy time vN chunks."""
    if microbatches % ranks:
        return None
    return fraction((ranks - 1) * times.total, chunks * microbatches * times.total)

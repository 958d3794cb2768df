"""AMPNet: an update after every k-th backward, which runs on the newest weights.

arXiv:1705.09786, section 5. Weights are not stashed: the forward and backward of a microbatch use
different weights, so the result is not the gradient of any function.
"""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules._streaming import STALE, bubble, periods, row, stale

NAME = "ampnet"
NEEDS = "microbatches a multiple of `every`, which an update takes; one version of the weights"
ALLOW = STALE
CANDIDATES = ("",)


def schedule(ranks: int, microbatches: int, every: int = 1) -> Schedule:
    """Returns one period of the steady state, with an update after every `every`-th backward.

    Raises:
        ScheduleError: there is no rank or no microbatch, or the number of updates is not whole.
    """
    check_sizes(NAME, ranks, microbatches)
    if every < 1 or microbatches % every:
        raise ScheduleError(
            f"{NAME}: an update for every {every} of {microbatches} microbatches",
            why="a period has a whole number of updates",
            todo="let `every` divide the number of microbatches",
        )
    behind = [ranks - 1 - rank for rank in range(ranks)]
    rows = Rows(lambda: [row(r, microbatches, behind[r], every) for r in range(ranks)])
    return Schedule(
        NAME, ranks, microbatches, rows, line(ranks), tuple(count + 1 for count in behind), bubble,
        flushes=False, warm_up=periods(2 * (ranks - 1), microbatches), versions=(1,) * ranks,
        staleness=tuple(stale(count, every) for count in behind), stashes=False,
    )  # fmt: skip

"""PipeMare: one version of the weights; learning rates and backwards make up for the delay.

arXiv:1910.05124. With P stages, numbered from 1, and N microbatches per update, the forward of
stage i uses weights that are on average (2 (P - i) + 1) / N updates older than those that its
gradient updates (Table 1). The backward uses the newest weights. Three techniques compensate for
the delay (section 3); each can be disabled:

- `annealed` (T1): in update k of the first `annealed` ones, the learning rate of a stage is divided
  by its delay to the power of 1 - k / annealed; delays below 1 count as 1. 0 disables it.
- `correction` (T2): the backward uses w - delay * v, an estimate of the weights of its forward,
  where v <- g v + (1 - g) (change of w) after every update, and g = D^(1 / delay). The option is D
  in thousandths; 0 disables it.
- `flushed` (T3): number of initial periods that run as 1F1B, with a flush.
"""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules import one_f_one_b
from autopar.inter_op.schedules._streaming import STALE, bubble, periods, row, stale
from autopar.ir.pipeline_step import Adjustment

NAME = "pipemare"
NEEDS = "any sizes; one version of the weights, and the velocity of their change"
ALLOW = STALE
CANDIDATES = ("",)


def schedule(
    ranks: int, microbatches: int, annealed: int = 0, correction: int = 135, flushed: int = 0
) -> Schedule:
    """Returns one period of the steady state: N microbatches and one update.

    A stage runs its backwards 2 (P - i) + 1 microbatches late, as if each stage ran a forward and a
    backward of different microbatches per tick.

    Raises:
        ScheduleError: there is no rank or no microbatch, or D is not below 1.
    """
    check_sizes(NAME, ranks, microbatches)
    if correction >= 1000:
        raise ScheduleError(
            f"{NAME}: correction={correction}",
            why="it is the decay D in thousandths, and the velocity follows the weights for D < 1",
            todo="use 135, as the paper, or 0 for no correction",
        )
    behind = [2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    delays = tuple(count / microbatches for count in behind)
    rows = Rows(lambda: [row(r, microbatches, behind[r], microbatches) for r in range(ranks)])
    return Schedule(
        NAME, ranks, microbatches, rows, line(ranks), tuple(count + 1 for count in behind), bubble,
        flushes=False, warm_up=periods(2 * behind[0], microbatches), versions=(1,) * ranks,
        staleness=tuple(stale(count, microbatches) for count in behind), stashes=False,
        adjustment=Adjustment(delays, annealed, correction / 1000),
        first=(flushed, one_f_one_b.schedule(ranks, microbatches)) if flushed else None,
    )  # fmt: skip

"""PipeDream: 1F1B without a flush, an update after every backward, stashed weights.

arXiv:1806.03377, section 3.3. A microbatch here is a minibatch of the paper: it has its own loss,
and its gradient updates the weights immediately. Stage s of p keeps the p - s weight versions that
its microbatches in flight started with, so that a backward uses the weights of its forward:

    W(t+1) = W(t) - lr grad f(W_0(t-p+1), W_1(t-p+2), ..., W_{p-1}(t))

With `vertical=1` (the paper's vertical sync) a microbatch uses one version in all stages, that of
the first stage when it entered, and every stage keeps p versions. If stage i has r_i replicas,
`versions_of_replicas` returns the number of versions that each replica keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules._streaming import STALE, bubble, periods, row

NAME = "pipedream"
NEEDS = "any sizes; an update for every microbatch, p - s versions of the weights of stage s"
ALLOW = STALE
CANDIDATES = ("", "vertical=1")


def schedule(ranks: int, microbatches: int, vertical: int = 0) -> Schedule:
    """Returns one period of PipeDream's steady state.

    Raises:
        ScheduleError: there is no rank or no microbatch, or `vertical` is neither 0 nor 1.
    """
    check_sizes(NAME, ranks, microbatches)
    if vertical not in (0, 1):
        raise ScheduleError(
            f"{NAME}: vertical={vertical}",
            why="1 synchronises versions over the stages, 0 does not",
            todo="give 0 or 1",
        )
    behind = [ranks - 1 - rank for rank in range(ranks)]
    forward = [vertical * rank for rank in range(ranks)]
    backward = [ranks - 1] * ranks if vertical else behind
    rows = Rows(
        lambda: [
            row(
                rank, microbatches, behind[rank], 1,
                lambda turn, age=forward[rank]: age,  # type: ignore[misc]
                lambda turn, age=backward[rank]: age,  # type: ignore[misc]
            )
            for rank in range(ranks)
        ]
    )  # fmt: skip
    in_flight = tuple(count + 1 for count in behind)
    return Schedule(
        NAME, ranks, microbatches, rows, line(ranks), in_flight, bubble, flushes=False,
        warm_up=periods(2 * (ranks - 1), microbatches), versions=tuple(n + 1 for n in backward),
        staleness=tuple(backward),
    )  # fmt: skip


def versions_of_replicas(replicas: Sequence[int], stage: int) -> int:
    """Returns the number of versions that each replica of a stage keeps.

    floor((N - 1 - (r_0 + ... + r_{s-1})) / r_s) + 1, with N devices in total: as many minibatches
    enter before one returns as there are devices from this stage on, less one, and the replicas
    process them in turn (section 3.2). For stages with one device each it is p - s.

    Args:
        replicas: number of replicas of each stage.
        stage: index of the stage, from 0.
    """
    return (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage] + 1

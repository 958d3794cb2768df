"""PipeDream: 1F1B without a flush, an update after every backward, stashed weights.

arXiv:1806.03377, section 3.3. A microbatch is what the paper calls a minibatch: its gradient, that
of its own loss, updates the weights at once. Stage s of p keeps the p - s versions that the
microbatches in flight were started with, so that a backward runs on the weights that its forward
saw:

    W(t+1) = W(t) - lr grad f(W_0(t-p+1), W_1(t-p+2), ..., W_{p-1}(t))

With `vertical=1` (the paper's vertical sync) a microbatch runs on one version in all stages, that
of the first stage when it entered, and every stage keeps p of them. Where stage i is replicated r_i
times on other numbers of devices, `versions_of_replicas` counts what each replica keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules._streaming import STALE, bubble, periods, row

NAME = "pipedream"
NEEDS = "any sizes; an update for every microbatch, p - s versions of the weights of stage s"
ALLOW = STALE


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
    """Returns how many versions each replica of a stage keeps, where stages are replicated.

    floor((N - 1 - (r_0 + ... + r_{s-1})) / r_s) + 1, with N devices in all: the devices from this
    stage on, less one, are how many minibatches enter before one comes back, and its replicas take
    them in turns (section 3.2). Of straight stages, one device each, it is p - s.

    Args:
        replicas: of each stage.
        stage: from 0.
    """
    return (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage] + 1

"""Time that overlap of collectives and kernels saves, and the slowdown that it causes."""

from __future__ import annotations

import math

from autopar.cost.work import NodeWork, Work
from autopar.errors import CostError

TAKE_TURNS = 2.0  # slowdown at which overlap gains nothing


def overlap_ratio(steps: int, step_seconds: float, collective_seconds: float) -> float:
    """Returns the share of an asynchronous collective hidden by local steps, from 0 to 1.

    CO2 (arXiv:2401.16265, sec. 3) starts the all_reduce of its outer loop and runs `steps` local
    steps before it needs the result: min(1, steps x step_seconds / collective_seconds). The rest is
    exposed.

    Raises:
        CostError: fewer than one step, or seconds that are not finite and positive (a step may take
            0).
    """
    good = math.isfinite(step_seconds) and math.isfinite(collective_seconds)
    if steps < 1 or not good or step_seconds < 0 or collective_seconds <= 0:
        raise CostError(
            f"{steps} steps of {step_seconds} seconds beside {collective_seconds} seconds do not "
            "have an overlap",
            why="at least one step is needed, and times that are finite and positive",
        )
    return min(1.0, steps * step_seconds / collective_seconds)


def side_by_side(kernels: float, collectives: float, slowdown: float) -> float:
    """Returns the seconds of kernels and collectives that run side by side.

    While both run, each takes `slowdown` times as long (see `autopar/simulate/engine.py`); the
    longer one then finishes alone: max(c + (s - 1) m, m + (s - 1) c). A slowdown of 2 gives their
    sum, as if they took turns.

    Args:
        kernels, collectives: seconds of each alone.
        slowdown: from 1 to 2.
    """
    more = slowdown - 1
    return max(kernels + more * collectives, collectives + more * kernels)


def saved(kernels: float, collectives: float, slowdown: float) -> float:
    """Returns the seconds saved against taking turns; arguments as in `side_by_side`."""
    return max(kernels + collectives - side_by_side(kernels, collectives, slowdown), 0.0)


def hidden(kernels: float, collective: float, parts: int, slowdown: float) -> float:
    """Returns the seconds saved by pipelining matrix products with a collective.

    Both are cut into one part per device. One part of each is exposed: the first part must arrive
    before it is multiplied, and the last product is sent after it is computed. torch's operators in
    torch.distributed._symmetric_memory work this way. The lower efficiency of smaller products is
    not counted, nor are copies, as for all collectives.

    Args:
        kernels, collective: seconds of each as a whole and alone.
        parts: number of devices.
        slowdown: slowdown while both run, from 1 to 2.
    """
    return (1 - 1 / parts) * saved(kernels, collective, slowdown)


def hidden_in_turns(kernels: float, sent: float, turns: int, slowdown: float) -> float:
    """Returns the seconds saved by sending in all turns of a computation but the last.

    Ring attention computes on one block of keys while it sends that for the next turn.

    Args:
        kernels, sent: seconds of all kernels and of all sends, each alone.
        turns: number of turns; none is saved in a single one.
        slowdown: slowdown while both run, from 1 to 2.
    """
    if turns < 2:
        return 0.0
    return (turns - 1) * saved(kernels / turns, sent / (turns - 1), slowdown)


def products(
    work: NodeWork, gradient: bool
) -> tuple[tuple[Work, ...], tuple[Work, ...], tuple[Work, ...]]:
    """Splits a linear's kernels: overlapped forwards, overlapped backwards, the others.

    Backwards only the product for the gradient of the input overlaps, if there is such a
    `gradient`; nothing waits for those of weight and bias.
    """
    first = int(gradient)
    return work.forward, work.backward[:first], work.backward[first:]

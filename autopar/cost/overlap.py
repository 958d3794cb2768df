"""What collectives take that nobody waits for at once."""

from __future__ import annotations

import math

from autopar.cost.work import NodeWork, Work
from autopar.errors import CostError

TAKE_TURNS = 2.0  # the slowdown at which nothing is gained by running side by side


def overlap_ratio(steps: int, step_seconds: float, collective_seconds: float) -> float:
    """The share of an asynchronous collective that fits beside so many local steps, 0 to 1.

    CO2 (arXiv:2401.16265, sec. 3) starts the all_reduce of its outer loop and goes on for `steps`
    steps before it needs the result: min(1, steps x step / all_reduce). What is left is waited for.

    Raises:
        CostError: no step, or seconds that are not finite and positive (a step's may be 0).
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
    """Seconds of kernels and collectives that run beside one another.

    While both run, each takes `slowdown` times as long (see `autopar/simulate/engine.py`); when one
    of them has ended, the other goes on alone: max(c + (s - 1) m, m + (s - 1) c). With a slowdown
    of 2 that is their sum, as if they took turns.

    Args:
        kernels, collectives: seconds that each would take alone.
        slowdown: from 1 to 2.
    """
    more = slowdown - 1
    return max(kernels + more * collectives, collectives + more * kernels)


def saved(kernels: float, collectives: float, slowdown: float) -> float:
    """Seconds less than if they took turns; arguments as of `side_by_side`."""
    return max(kernels + collectives - side_by_side(kernels, collectives, slowdown), 0.0)


def hidden(kernels: float, collective: float, parts: int, slowdown: float) -> float:
    """Seconds less that products and a collective take where one works while the other sends.

    Both go in as many parts as there are devices. One part of each runs alone: what is sent first
    has to arrive before it is multiplied, what is multiplied last is sent after that. torch's
    operators do so (torch.distributed._symmetric_memory); what smaller products lose is left out,
    and so are copies, as for all collectives.

    Args:
        kernels, collective: seconds that each takes as a whole and alone.
        parts: devices.
        slowdown: of what runs side by side, from 1 to 2.
    """
    return (1 - 1 / parts) * saved(kernels, collective, slowdown)


def products(
    work: NodeWork, gradient: bool
) -> tuple[tuple[Work, ...], tuple[Work, ...], tuple[Work, ...]]:
    """Kernels of a linear that run beside collectives, forwards and backwards, and the others.

    Backwards it is the product for the gradient of what is multiplied, if that has a `gradient`;
    those of weight and bias wait for nobody.
    """
    first = int(gradient)
    return work.forward, work.backward[:first], work.backward[first:]

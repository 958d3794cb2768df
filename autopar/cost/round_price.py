"""Predicted seconds of local updates: independent steps, and one synchronisation per round.

CO2 (arXiv:2401.16265) publishes both an overlap ratio, tau t_step / t_sync, and throughputs, and
they disagree: at tau = 12 the ratio says 83 %, the throughput 43 %. Throughputs agree with one
another if an all_reduce during computation takes 1.8 times as long as one alone, and computation no
longer: 2.5 to 2.9 s a round of 12 steps of 0.109 s on 16 to 128 GPUs, where one alone takes 1.48 to
1.57 s. That factor is `CONTENTION`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import CostError

CONTENTION = 1.8


@dataclass(frozen=True)
class RoundPrice:
    """Predicted seconds of a round.

    Attributes:
        tau: its steps.
        step_seconds: seconds of a local step.
        sync_seconds: seconds of the synchronisation, as it runs: during steps, or alone.
        hidden: whether it overlaps with steps.
    """

    tau: int
    step_seconds: float
    sync_seconds: float
    hidden: bool

    @property
    def seconds(self) -> float:
        """Returns the seconds of the round."""
        local = self.tau * self.step_seconds
        return max(local, self.sync_seconds) if self.hidden else local + self.sync_seconds

    @property
    def exposed_seconds(self) -> float:
        """Returns the seconds of synchronisation that devices wait for, per step."""
        return (self.seconds - self.tau * self.step_seconds) / self.tau

    @property
    def efficiency(self) -> float:
        """Returns the throughput, relative to replicas that never synchronise."""
        return self.tau * self.step_seconds / self.seconds


def round_price(step: float, sync: float, hidden: bool, tau: int = 0) -> RoundPrice:
    """Returns the price of a round.

    Args:
        step: seconds of a local step.
        sync: seconds of the synchronisation alone.
        hidden: whether it overlaps with the steps of the next round.
        tau: steps of a round; 0 takes the fewest that hide it, or if it runs by itself the fewest
            of which it takes at most a twentieth.

    Raises:
        CostError: seconds that are not finite, negative, or a step of none.
    """
    if not (math.isfinite(step) and math.isfinite(sync) and step > 0 and sync >= 0 and tau >= 0):
        raise CostError(
            f"rounds of {tau} steps of {step} seconds and {sync} seconds have no price",
            why="steps take finite, positive seconds",
        )
    running = sync * CONTENTION if hidden else sync
    best = math.ceil(running / step if hidden else 20 * running / step)
    return RoundPrice(tau or max(best, 1), step, running, hidden)


def overlap_ratio(step: float, sync: float, tau: int) -> float:
    """Returns the share of a synchronisation that a round of tau steps covers, without contention.

    CO2's table of overlaps has this number; its throughputs are lower, see the module.

    Args:
        step, sync: seconds of a step and of the synchronisation alone.
        tau: steps of a round.
    """
    return min(1.0, tau * step / sync) if sync > 0 else 1.0

"""The frontier of step time against memory: the fastest plans within tighter and tighter limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.errors import InfeasibleError
from autopar.stage_plan import StagePlan

SHRINK = 0.85  # memory limit of the next plan, in units of the last plan's peak


def frontier(plan: Callable[[float], StagePlan], shrink: float = SHRINK) -> Iterator[StagePlan]:
    """Yields plans with less and less memory; each is faster than all smaller ones.

    Args:
        plan: returns the fastest plan within a number of bytes per device, or raises
            InfeasibleError.
        shrink: the limit of the next plan, as a fraction of the last one's peak.

    Yields:
        The fastest plan first, each as soon as no later plan can dominate it, and last the plan
        after which nothing fits.
    """
    last = plan(math.inf)
    while True:
        try:
            # The new plan may be no slower than the last one, and then replaces it.
            after = plan(shrink * last.predicted.peak_bytes)
        except InfeasibleError:
            yield last
            return
        if after.predicted.step_seconds > last.predicted.step_seconds:
            yield last
        last = after

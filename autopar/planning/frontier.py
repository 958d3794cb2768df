"""Step time against memory: the fastest plans under tighter and tighter limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.errors import InfeasibleError
from autopar.stage_plan import StagePlan

SHRINK = 0.85  # of the memory of the last plan that the next one may have


def frontier(plan: Callable[[float], StagePlan], shrink: float = SHRINK) -> Iterator[StagePlan]:
    """Plans of less and less memory, none of which is slower than a smaller one.

    Args:
        plan: the fastest plan within so many bytes a device; InfeasibleError if there is none.
        shrink: the share of a plan's memory that the next one may have.

    Yields:
        The fastest plan of all first, each as soon as it cannot be beaten by what follows, and the
        last one shortly before nothing fits any more.
    """
    last = plan(math.inf)
    while True:
        try:
            # It may need less than the last one was allowed, or be no slower.
            after = plan(shrink * last.predicted.peak_bytes)
        except InfeasibleError:
            yield last
            return
        if after.predicted.step_seconds > last.predicted.step_seconds:
            yield last
        last = after

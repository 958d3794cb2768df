"""The seconds of the cheapest paths from several layouts to all others, in compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.loops import entry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@entry
def shorten(seconds: Floats, first: Ints, target: Ints, price: Floats) -> None:
    """Lowers the seconds of each layout (row) from each start (column) to those of cheapest paths.

    Bellman and Ford, for all starts at once; only layouts whose seconds changed are left again.

    Args:
        seconds: 0 at the starts, elsewhere infinite.
        first: for each layout, the first step that leaves it; at the end, the number of steps.
        target, price: the layout that each step enters, and its seconds.
    """
    layouts, starts = seconds.shape
    changed = np.ones(layouts, np.bool_)
    waiting = True
    while waiting:
        waiting = False
        for layout in range(layouts):
            if not changed[layout]:
                continue
            changed[layout] = False
            for step in range(first[layout], first[layout + 1]):
                entered, paid = target[step], price[step]
                better = False
                for start in range(starts):
                    total = seconds[layout, start] + paid
                    better |= total < seconds[entered, start]
                    seconds[entered, start] = min(seconds[entered, start], total)
                if better:
                    changed[entered] = waiting = True

"""Plans of several stages at once, and of one for several numbers of microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.planning.within_memory import ALIKE
from autopar.planning.workers import Workers
from autopar.stage_plan import StagePlan

K = TypeVar("K")


def at_once(wanted: dict[K, Callable[[], StagePlan]], workers: Workers) -> dict[K, StagePlan]:
    """Makes plans, in several processes if there are any.

    The last stage contains the loss and takes longest, so plans are distributed starting with the
    last one, back and forth over the processes.
    """
    dealt: list[list[K]] = [[] for _ in range(len(workers))]
    for number, key in enumerate(reversed(wanted)):
        lap, place = divmod(number, len(workers))
        dealt[-1 - place if lap % 2 else place].append(key)
    answers = workers.run([[wanted[key] for key in row] for row in dealt])
    return {
        key: plan
        for row, plans in zip(dealt, answers, strict=True)
        for key, plan in zip(row, plans, strict=True)
    }


def by_in_flight(
    kept: Sequence[float], planned: Callable[[float], StagePlan]
) -> dict[float, StagePlan]:
    """Returns plans for numbers of microbatches in flight, which are in ascending order.

    A plan for many microbatches also serves fewer, and is as good if the best plan for the fewest
    is no faster.
    """
    plans = {kept[-1]: planned(kept[-1])}
    left = [(0, len(kept) - 1)]
    while left:
        low, high = left.pop()
        if kept[low] not in plans:
            plans[kept[low]] = planned(kept[low])
        few, many = plans[kept[low]], plans[kept[high]]
        slower = many.predicted.step_seconds > (1 + ALIKE) * few.predicted.step_seconds
        if slower and high - low > 1:
            middle = (low + high) // 2
            plans[kept[middle]] = planned(kept[middle])
            left += [(low, middle), (middle, high)]
        else:
            plans |= dict.fromkeys(kept[low + 1 : high], many)
    return plans

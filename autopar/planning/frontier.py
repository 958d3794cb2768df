"""The frontier of step time against memory: the fastest plans within tighter and tighter limits.

Several models that train in one job share the memory of the devices. What a model keeps between its
steps, parameters and optimizer state, adds up over the models; what only a step needs does not,
because the models take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from autopar.errors import InfeasibleError
from autopar.ir.units import format_bytes
from autopar.plan import Plan
from autopar.stage_plan import StagePlan

SHRINK = 0.85  # memory limit of the next plan, in units of the last plan's peak
P = TypeVar("P", Plan, StagePlan)


def frontier(plan: Callable[[float], P], shrink: float = SHRINK) -> Iterator[P]:
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


@dataclass(frozen=True)
class CombinedPlans:
    """Plans of models that take turns on the same devices.

    Attributes:
        plans: one for each of the models so far.
        seconds: seconds of one turn of all models.
        kept: bytes per device that they keep between their steps.
        passing: the most bytes per device that one of them needs in addition.
    """

    plans: tuple[Plan, ...] = ()
    seconds: float = 0.0
    kept: float = 0.0
    passing: float = 0.0

    @classmethod
    def of(cls, plans: Iterable[Plan]) -> CombinedPlans:
        """Returns plans of models that run once in a turn."""
        return reduce(lambda together, plan: together.plus(plan, 1.0), plans, cls())

    @property
    def peak(self) -> float:
        """Peak bytes per device."""
        return self.kept + self.passing

    def plus(self, plan: Plan, calls: float) -> CombinedPlans:
        """Returns these plans and one of a further model, which runs `calls` times in a turn."""
        figures = plan.predicted
        return CombinedPlans(
            (*self.plans, plan),
            self.seconds + calls * figures.step_seconds,
            self.kept + figures.parameter_bytes,
            max(self.passing, figures.peak_bytes - figures.parameter_bytes),
        )

    def dominates(self, other: CombinedPlans) -> bool:
        """Returns whether these plans are no worse in any respect."""
        return (
            self.seconds <= other.seconds
            and self.kept <= other.kept
            and self.passing <= other.passing
        )


def fastest_together(
    plans: Mapping[str, Callable[[float], Plan]], calls: Mapping[str, float], limit: float
) -> dict[str, Plan]:
    """Returns plans of several models that fit into memory together.

    If the fastest plans do not, they are the fastest choice from the models' frontiers.

    Args:
        plans: for each model, returns the fastest plan within a number of bytes per device, or
            raises InfeasibleError.
        calls: how often a model runs in a turn of all; once by default.
        limit: bytes per device.

    Raises:
        InfeasibleError: no choice fits, or a single model does not; states the models' needs.
    """
    fastest = {name: _alone(name, plan, limit) for name, plan in plans.items()}
    if CombinedPlans.of(fastest.values()).peak <= limit:
        return fastest
    frontiers = {name: [*frontier(_within(limit, plan))] for name, plan in plans.items()}
    choices = [CombinedPlans()]
    for name, candidates in frontiers.items():
        often = calls.get(name, 1.0)
        longer = [choice.plus(plan, often) for choice in choices for plan in candidates]
        choices = _undominated([each for each in longer if each.peak <= limit])
    if choices:
        best = min(choices, key=lambda each: each.seconds)
        return dict(zip(plans, best.plans, strict=True))
    smallest = {name: candidates[-1] for name, candidates in frontiers.items()}
    needs = CombinedPlans.of(smallest.values()).peak
    raise InfeasibleError(
        f"the models do not fit together into {format_bytes(limit)} a device",
        why=f"their smallest plans need {format_bytes(needs)}; they keep "
        + ", ".join(
            f"{name} {format_bytes(plan.predicted.parameter_bytes)}"
            for name, plan in smallest.items()
        ),
        todo="use more devices, smaller batches, a lower precision or a leaner optimizer",
    )


def _alone(name: str, plan: Callable[[float], Plan], limit: float) -> Plan:
    try:
        return plan(limit)
    except InfeasibleError as error:
        error.where = error.where or f"the model {name!r}"
        raise


def _within(limit: float, plan: Callable[[float], Plan]) -> Callable[[float], Plan]:
    """Returns a planning function whose memory limit is at most `limit`."""
    return lambda most: plan(min(most, limit))


def _undominated(choices: Sequence[CombinedPlans]) -> list[CombinedPlans]:
    """Returns the choices that no other one dominates."""
    kept: list[CombinedPlans] = []
    for choice in sorted(choices, key=lambda each: (each.seconds, each.kept, each.passing)):
        if not any(other.dominates(choice) for other in kept):
            kept.append(choice)
    return kept

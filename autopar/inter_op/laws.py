"""Derives the closed-form step time (`Law`) of a schedule, which a stage search needs.

A step of equal stages takes B t + fill (D - 1) t seconds with D ranks, B microbatches and t seconds
of work per rank and microbatch. `fill` follows from the bubble of the schedule: 1 for GPipe and
1F1B, 1/v for v chunks, and so on. For an asynchronous schedule, the formula gives one period
of the steady state; warm-up and drain occur once per training run and are ignored. `fill` is 0 if
no rank is ever idle in it.

Where no closed form of the bubble is published, a few microbatches per rank are simulated; more
microbatches do not change the result. The fraction of transfer time that stalls a rank in every
microbatch is simulated, too: 1F1B waits for round trips between neighbours, while interleaved and
zero-bubble schedules overlap them with other work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from autopar.errors import ScheduleError
from autopar.inter_op.complete import with_sends
from autopar.inter_op.schedule import Schedule, Times
from autopar.inter_op.schedule_time import StageCost, prepare, simulate
from autopar.inter_op.schedules import recipe_of
from autopar.inter_op.stage_values import Law
from autopar.inter_op.steady_state import steady
from autopar.ir.pipeline_step import Step

_ROUNDS = 3  # simulated microbatches per rank
_RANKS = 8  # ranks in the simulation of transfers
_TRANSFER = 0.05  # seconds of each transfer, relative to the work of a rank on a microbatch


def law(name: str, **options: int) -> Law:
    """Returns the law of a schedule.

    Args:
        name: name of the schedule.
        options: options of the schedule, such as `chunks`.

    Raises:
        ScheduleError: the schedule does not exist or does not take these options.
    """
    build = partial(recipe_of(name).build, **options)
    chunks = copies = 0
    refused: ScheduleError | None = None
    for ranks in (2, 4):  # some schedules need an even number
        try:
            made = build(ranks, 2 * ranks)
        except ScheduleError as error:
            refused = error
            continue
        chunks, copies = made.stages // ranks, made.copies
        break
    if refused and not chunks:
        raise refused

    @cache
    def made_for(ranks: int, microbatches: int) -> Schedule | None:
        try:
            return build(ranks, microbatches)
        except ScheduleError:
            return None

    def fits(ranks: int, microbatches: int) -> bool:
        return made_for(ranks, microbatches) is not None

    @cache
    def simulated_fill(ranks: int, microbatches: int) -> float:
        made = build(ranks, microbatches)
        costs = [StageCost()] * made.stages
        if made.flushes:
            bubble = simulate(made, costs).bubble
        else:
            bubble = steady(with_sends(made), costs)[1]
        return _fill(bubble, ranks, microbatches)

    @cache
    def fill(ranks: int, microbatches: int) -> float:
        made = made_for(ranks, microbatches)
        if made is None or ranks == 1:
            return 1.0
        bubble = None if made.joined else made.bubble(Times())
        if bubble is not None:
            return _fill(bubble, ranks, microbatches)
        few = min(microbatches, _ROUNDS * ranks + microbatches % ranks)
        if made_for(ranks, few) is None:  # some schedules need a multiple of another number
            few = microbatches
        return simulated_fill(ranks, few)  # many numbers of microbatches have the same few

    def in_flight(last: int, ranks: int, microbatches: int) -> float:
        made = made_for(ranks, microbatches)
        if made is None:
            return float("inf")
        return made.in_flight[ranks - last] / len(made.holds[ranks - last])

    def holds(rank: int, ranks: int) -> tuple[int, ...]:
        made = build(ranks, _ROUNDS * ranks)
        return tuple(stage for stage, _ in made.holds[rank])

    words = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
    exposed = _exposed(build)
    return Law(words, in_flight, fill, exposed, fits, cache(holds), chunks, copies)


def _fill(bubble: float, ranks: int, microbatches: int) -> float:
    """Returns the `fill` of a law whose steps are idle for the fraction `bubble`."""
    return bubble / (1 - bubble) * microbatches / (ranks - 1)


def _exposed(build: Callable[[int, int], Schedule]) -> float:
    """Returns the seconds that transfers add per microbatch, relative to those into one rank."""

    def seconds(microbatches: int) -> Iterator[float]:
        """Yields the seconds of a step without and with transfers."""
        made = build(_RANKS, microbatches)
        part = _RANKS / made.stages
        costs = [StageCost(part / 3, part / 3, part / 3)] * made.stages
        step = prepare(made) if made.flushes else with_sends(made)
        for transfer in (0.0, _TRANSFER):
            borders = [transfer * part / 2] * (made.stages - 1)
            if isinstance(step, Step):
                yield steady(step, costs, borders)[0]
            else:
                yield step.run(costs, borders).seconds

    few, many = _ROUNDS * _RANKS, 2 * _ROUNDS * _RANKS
    more = [after - before for before, after in zip(seconds(few), seconds(many), strict=True)]
    return max(more[1] - more[0], 0.0) / ((many - few) * _TRANSFER)

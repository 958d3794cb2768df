"""Schedules as plans name them, "1f1b" or "interleaved_1f1b chunks=2", and what ranks keep."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedules import schedule as make_schedule
from autopar.planning.options import Options


def read_schedule(text: str) -> tuple[str, dict[str, int]]:
    """Name and options of "interleaved_1f1b chunks=2".

    Raises:
        ScheduleError: an option that is no number.
    """
    name, *words = text.split() or [""]
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value.isdigit():
            raise ScheduleError(
                f"cannot read {word!r} of the schedule {text!r}",
                why="behind the name of a schedule stand its options",
                todo='write e.g. "interleaved_1f1b chunks=2"',
            )
        options[key] = int(value)
    return name, options


def schedule_of(text: str, groups: int, microbatches: int) -> Schedule:
    """The schedule that a text names, for so many groups of devices.

    Raises:
        ScheduleError: there is no such schedule, or none for these sizes and options.
    """
    name, options = read_schedule(text)
    try:
        return make_schedule(name, groups, microbatches, **options)
    except TypeError as error:
        raise ScheduleError(
            f"the schedule {name} does not take {', '.join(options)}", why=str(error)
        ) from error


def groups_for(text: str, stages: int, microbatches: int) -> int:
    """How many groups of devices a schedule deals so many stages out to.

    Raises:
        ScheduleError: it takes no such number of stages; or as `schedule_of`.
    """
    refused: ScheduleError | None = None
    for groups in range(stages, 0, -1):
        if stages % groups:
            continue
        try:
            if schedule_of(text, groups, microbatches).stages == stages:
                return groups
        except ScheduleError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    raise ScheduleError(
        f"the schedule {text!r} does not take {stages} stages",
        why="each group of devices has the same number of stages in it",
        todo="change the number of stages, or the schedule's options",
    )


def in_flight(schedule: Schedule, stage: int) -> float:
    """Of how many microbatches a stage keeps activations at most, on average over those of its
    rank.
    """
    ranks = {placed[stage] for placed in schedule.placement}
    return max(schedule.in_flight[rank] / len(schedule.holds[rank]) for rank in ranks)


def further_copies(schedule: Schedule, stage: int) -> int:
    """How many tensors like its weights a stage holds beside them: older versions, gradients that
    are under way, and where its backward is corrected their velocity and what they were before.
    """
    older = schedule.versions[stage] - 1 if schedule.versions else 0
    return older + schedule.pending + (2 if schedule.adjustment.decay else 0)


def with_state(options: Options, schedule: Schedule) -> Options:
    """Options whose parameters lie as a schedule needs them.

    Older versions of weights are held whole, and what corrects them is too; see
    `runtime/pipeline/refusals.py`. What a user asks for stays, and is refused there.
    """
    if schedule.flushes or options.state is not None:
        return options
    whole = schedule.adjustment.decay or schedule.pending
    return replace(options, state="ddp" if whole else "zero1")


def held_beside(schedule: Schedule, stage: int) -> float:
    """How many stages there are on the rank of a stage that has the most."""
    ranks = {placed[stage] for placed in schedule.placement}
    return float(max(len(schedule.holds[rank]) for rank in ranks))

"""Parses schedules as plans name them, "interleaved_1f1b chunks=2", and prices their memory."""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedules import schedule as make_schedule
from autopar.ir.units import parse_whole


def read_schedule(text: str) -> tuple[str, dict[str, int]]:
    """Parses "interleaved_1f1b chunks=2" into a name and options.

    Raises:
        ScheduleError: an option is malformed.
    """
    name, *rest = text.split() or [""]
    options = {}
    for option in rest:
        key, equals, value = option.partition("=")
        number = parse_whole(value)
        if not equals or number is None:
            raise ScheduleError(
                f"cannot read {option!r} of the schedule {text!r}",
                why="options follow the name, each as key=number",
                todo='write e.g. "interleaved_1f1b chunks=2"',
            )
        options[key] = number
    return name, options


def schedule_of(text: str, groups: int, microbatches: int) -> Schedule:
    """Returns the schedule that a text names, for a number of device groups.

    Raises:
        ScheduleError: the schedule is unknown, or does not exist for these sizes and options.
    """
    name, options = read_schedule(text)
    try:
        return make_schedule(name, groups, microbatches, **options)
    except TypeError as error:
        raise ScheduleError(
            f"the schedule {name} does not take {', '.join(options)}", why=str(error)
        ) from error


def groups_for(text: str, stages: int, microbatches: int) -> int:
    """Returns the number of device groups over which a schedule distributes a number of stages.

    Raises:
        ScheduleError: it cannot have that many stages, or as `schedule_of`.
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
        why="each group of devices must hold the same number of stages",
        todo="change the number of stages, or the schedule's options",
    )


def in_flight(schedule: Schedule, stage: int) -> float:
    """Returns the peak number of microbatches in flight, averaged over the stages of a rank."""
    ranks = {placed[stage] for placed in schedule.placement}
    return max(schedule.in_flight[rank] / len(schedule.holds[rank]) for rank in ranks)


def stages_of_rank(schedule: Schedule, stage: int) -> float:
    """Returns the largest number of stages on any rank that holds this stage."""
    ranks = {placed[stage] for placed in schedule.placement}
    return float(max(len(schedule.holds[rank]) for rank in ranks))

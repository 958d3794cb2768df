"""Synchronises updates of parameters shared by several stages in schedules without a flush.

Every stage that shares a parameter sums the gradients of all sharing stages and applies the same
update. Stages near the end of the pipeline have their gradients earlier than those near the
beginning, so each stage postpones its updates to those of the latest sharing stage. It lowers the
ages of its weights accordingly, which leaves the result unchanged. This is possible unless a stage
runs a microbatch on weights that include a gradient which another stage receives only later.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Schedule
from autopar.ir.action import COMPUTE, UPDATE, Action, Row
from autopar.ir.pipeline_step import Wiring, versions

Updates = list[tuple[int, int]]  # (compute actions of the row before the update, its microbatch)


def tied_updates(schedule: Schedule, wiring: Wiring) -> Schedule:
    """Returns a schedule whose stages update shared parameters at the same time.

    Args:
        schedule: any schedule; returned unchanged if it flushes or its stages share nothing.
        wiring: the connections of the model's stages.

    Raises:
        ScheduleError: a stage uses weights with gradients that are not yet available to all.
    """
    if schedule.flushes or not any(wiring.tied):
        return schedule
    rows = list(schedule.rows)
    place = schedule.placement[0]
    for group in _groups(wiring):
        if len({place[stage] for stage in group}) < len(group) or schedule.copies > 1:
            raise _refused(schedule, group, wiring, "two of them are on one rank, in one row")
        updates = {stage: _updates(rows[place[stage]]) for stage in group}
        latest = max(group, key=lambda stage: max(at - 2 * batch for at, batch in updates[stage]))
        for stage in group:
            rows[place[stage]] = _moved(schedule, wiring, stage, group, updates, latest)
    held = versions(rows)
    count = tuple(held[stage, 0] for stage in range(schedule.stages))
    return replace(schedule, rows=tuple(rows), versions=count if schedule.versions else ())


def _groups(wiring: Wiring) -> list[list[int]]:
    """Returns the groups of stages that share parameters, directly or transitively."""
    groups: list[tuple[set[int], set[str]]] = []
    for stage, names in enumerate(wiring.tied):
        own = {stage}, set(names)
        for other in [group for group in groups if group[1] & own[1]]:
            groups.remove(other)
            own = own[0] | other[0], own[1] | other[1]
        if names:
            groups.append(own)
    return [sorted(stages) for stages, _ in groups]


def _updates(row: Row) -> Updates:
    """Returns the positions of the updates in a row."""
    computed = accumulate(action.kind in COMPUTE for action in row)
    pairs = zip(computed, row, strict=True)
    return [(at, action.microbatch) for at, action in pairs if action.kind == UPDATE]


def _newest(updates: Updates, at: int, microbatches: int) -> int:
    """Returns the newest version before a compute action of a row, relative to the period's."""
    every = microbatches // len(updates)
    before = bisect_right([place for place, _ in updates], at)
    batch = updates[before - 1][1] if before else updates[-1][1] - microbatches
    return (batch + 1) // every


def _moved(
    schedule: Schedule,
    wiring: Wiring,
    stage: int,
    group: list[int],
    updates: dict[int, Updates],
    latest: int,
) -> Row:
    """Returns the row of a stage with the updates of the latest stage of its group."""
    row, size = schedule.rows[schedule.placement[0][stage]], schedule.microbatches
    own, new = updates[stage], updates[latest]
    if own == new:
        return row
    if len(own) != len(new):
        raise _refused(schedule, group, wiring, "they are not updated equally often")
    if any(action.kind not in (*COMPUTE, UPDATE) for action in row):
        raise _refused(schedule, group, wiring, "their sums are awaited in different places")
    made: list[Action] = []
    left, at = list(new), 0
    for action in row:
        if action.kind == UPDATE:
            continue
        made += _due(stage, left, at)
        version = _newest(own, at, size) - action.age
        age = _newest(new, at, size) - version
        if age < 0:
            other = stage if latest != stage else next(one for one in group if one != stage)
            raise _refused(
                schedule, group, wiring,
                f"{action} runs on weights with a gradient that stage {latest} has {-age} updates "
                f"later than stage {other}",
            )  # fmt: skip
        made.append(action._replace(age=age))
        at += 1
    return (*made, *_due(stage, left, at))


def _due(stage: int, left: Updates, at: int) -> list[Action]:
    """Removes from `left` and returns the updates due before the next compute action."""
    found: list[Action] = []
    while left and left[0][0] <= at:
        found.append(Action(UPDATE, stage, left.pop(0)[1]))
    return found


def _refused(schedule: Schedule, group: list[int], wiring: Wiring, why: str) -> ScheduleError:
    names = sorted({name for stage in group for name in wiring.tied[stage]})
    return ScheduleError(
        f"{schedule.name} cannot train the parameter {names[0]!r}, which is held by the stages "
        + " and ".join(map(str, group)),
        why=why,
        todo='untie it, let one stage hold it, or use "2bw", "pipedream vertical=1" or 1f1b, whose '
        "stages all run a microbatch on one version of the weights",
    )

"""Determines the weight version of every forward and backward by walking the rows of a step.

Version 0 denotes the weights before the first update of a stage; each UPDATE creates the next
version. An action of age a uses the newest version minus a, or version 0 if there have been fewer
updates. This module shares no code with the schedules that build the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.ir.action import ALL, COMPUTE, UPDATE, Action
from autopar.ir.pipeline_step import Placed, Step


@dataclass
class StageWeights:
    """The weight versions of one stage.

    Attributes:
        forwards, backwards: the version that each microbatch uses.
        updates: number of updates.
        versions: maximum number of versions kept at a time, counting only those used later.
        staleness: maximum number of updates by which the weights that a gradient was computed with
            are older than those that it updates.
    """

    forwards: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)
    updates: int = 0
    versions: int = 1
    staleness: int = 0

    @property
    def consistent(self) -> bool:
        """Returns whether every backward uses the weights of its forward."""
        return all(self.forwards[batch] == version for batch, version in self.backwards.items())


def walk(step: Step) -> dict[Placed, StageWeights]:
    """Returns the weight versions that each stage and copy uses.

    Args:
        step: complete rows, from the first microbatch to the last.

    Raises:
        ScheduleError: an update has no gradient, or gradients remain without an update.
    """
    found: dict[Placed, StageWeights] = {}
    for row in step.rows:
        for key in dict.fromkeys((action.stage, action.copy) for action in row):
            own = [action for action in row if (action.stage, action.copy) == key]
            found[key] = _walked([one for one in own if one.kind in (*COMPUTE, UPDATE)])
    return found


def _walked(row: Sequence[Action]) -> StageWeights:
    """Returns the weight versions of one stage."""
    found = StageWeights()
    waiting: list[int] = []  # microbatches whose gradients await an update
    used: list[tuple[int, int]] = []  # (updates so far, version used)
    for action in row:
        if action.kind == UPDATE:
            taken = [m for m in waiting if action.microbatch in (ALL, m) or m < action.microbatch]
            if not taken:
                raise ScheduleError(
                    f"{action} has no gradients to use",
                    why=f"gradients wait of the microbatches {waiting or 'none'}",
                    todo="move it behind the backwards whose gradients it uses",
                )
            oldest = min(found.forwards[batch] for batch in taken)
            found.staleness = max(found.staleness, found.updates - oldest)
            waiting = [batch for batch in waiting if batch not in taken]
            found.updates += 1
            continue
        version = max(0, found.updates - action.age)
        used.append((found.updates, version))
        if action.kind == "F":
            found.forwards[action.microbatch] = version
        else:
            found.backwards[action.microbatch] = version
        if action.kind in "BW":
            waiting.append(action.microbatch)
    if waiting and found.updates:
        raise ScheduleError(
            f"no update uses the gradients of the microbatches {waiting} of stage {row[0].stage}",
            todo="add an update after their backwards",
        )
    found.versions = _held(used, found.updates)
    return found


def _held(used: Sequence[tuple[int, int]], updates: int) -> int:
    """Returns the peak number of versions kept: the newest, and older ones that are used later."""
    last: dict[int, int] = defaultdict(int)  # version -> updates so far at its last use
    for newest, version in used:
        last[version] = max(last[version], newest)
    return max(
        1 + sum(version < newest <= until for version, until in last.items())
        for newest in range(updates + 1)
    )


def check_weights(step: Step, versions: Sequence[int] = (), stashes: bool = True) -> None:
    """Checks that no version is overwritten while it is still needed.

    Args:
        step: complete rows, from the first microbatch to the last.
        versions: number kept by each stage; () for one everywhere.
        stashes: whether every backward must use the weights of its forward.

    Raises:
        ScheduleError: a version is needed after it was overwritten; a backward uses other weights
            than its forward; or as `walk`.
    """
    for (stage, copy), found in walk(step).items():
        held = versions[stage] if versions else 1
        if found.versions > held:
            raise ScheduleError(
                f"stage {stage} needs {found.versions} versions of its weights at a time",
                where=f"copy {copy} of the model" if len(step.placement) > 1 else "",
                why=f"it holds {held}: the next update overwrites one that is still needed",
                todo="hold more versions, or use newer weights",
            )
        if stashes and not found.consistent:
            batch = next(m for m, v in found.backwards.items() if found.forwards[m] != v)
            raise ScheduleError(
                f"the backward of stage {stage} on microbatch {batch} runs on version"
                f" {found.backwards[batch]} of the weights",
                why=f"its forward saw version {found.forwards[batch]}",
                todo="give the backward the age of the weights that its forward saw",
            )

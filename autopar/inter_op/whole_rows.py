"""Checks that rows compute a whole step: every stage runs every microbatch once, on its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ScheduleError
from autopar.ir.action import COMPUTE, KINDS, Action, Row

Ints = NDArray[np.int64]
CODE = {kind: code for code, kind in enumerate(KINDS)}
F, B, I, W = range(4)  # noqa: E741


@dataclass(frozen=True, eq=False)
class Columns:
    """Actions as arrays with one entry per action, ordered by rank.

    Attributes:
        flat: the actions.
        begins: start of each rank's row, plus the end of the last row.
        rank, kind, stage, batch, copy: of each action; the kind is its index in KINDS.
        shape: (copies, stages, microbatches).
    """

    flat: list[Action]
    begins: Ints
    rank: Ints
    kind: Ints
    stage: Ints
    batch: Ints
    copy: Ints
    shape: tuple[int, int, int]

    @classmethod
    def of(
        cls, rows: Sequence[Row], placement: Sequence[Sequence[int]], microbatches: int
    ) -> Columns:
        """Builds the columns of the given rows."""
        flat = [action for row in rows for action in row]
        begins = np.cumsum([0, *map(len, rows)])
        kind = np.array([CODE.get(action[0], -1) for action in flat], np.int64)
        stage, batch, copy = (np.array([*map(itemgetter(at), flat)], np.int64) for at in (1, 2, 3))
        rank = np.repeat(np.arange(len(rows)), np.diff(begins))
        shape = len(placement), len(placement[0]), microbatches
        return cls(flat, begins, rank, kind, stage, batch, copy, shape)

    def where(self, kind: int, chosen: NDArray[np.bool_] | None = None) -> Ints:
        """Returns the positions of a kind of action by copy, stage and microbatch; -1 if absent."""
        found = np.full(self.shape, -1)
        at = np.flatnonzero(self.kind == kind if chosen is None else (self.kind == kind) & chosen)
        found[self.copy[at], self.stage[at], self.batch[at]] = at
        return found


def check_whole(columns: Columns, placement: Sequence[Sequence[int]]) -> None:
    """Checks that ranks run their stages forwards and backwards once per microbatch.

    Args:
        columns: the compute actions only.
        placement: the rank of each stage of each copy.

    Raises:
        ScheduleError: an action is missing, duplicate, unknown or on a rank that does not hold its
            stage.
    """
    c = columns
    strange = (c.kind < 0) | (c.kind >= len(COMPUTE))
    for column, size in zip((c.copy, c.stage, c.batch), c.shape, strict=True):
        strange |= (column < 0) | (column >= size)
    for at in np.flatnonzero(strange):
        raise ScheduleError(
            f"{c.flat[at]} is no action that computes a part of the step",
            why=f"there are {c.shape[1]} stages, {c.shape[2]} microbatches and {c.shape[0]} copies",
            todo="give a schedule rows of F, B, I and W; the rest is added by `complete`",
        )
    where = np.stack([c.where(kind) for kind in range(len(COMPUTE))])
    double = np.flatnonzero(where[c.kind, c.copy, c.stage, c.batch] != np.arange(len(c.flat)))
    if len(double):
        action = c.flat[double[0]]
        raise ScheduleError(f"{action} is in the schedule twice", todo="leave one of them out")
    elsewhere = np.flatnonzero(np.array(placement)[c.copy, c.stage] != c.rank)
    if len(elsewhere):
        action = c.flat[elsewhere[0]]
        raise ScheduleError(
            f"{action} is on rank {c.rank[elsewhere[0]]}",
            why=f"the placement has its stage on rank {placement[action.copy][action.stage]}",
            todo="move the action or the stage",
        )
    there = where >= 0
    taken = there[F].any(axis=1)  # by copy and microbatch
    halves = there[I].astype(int) + there[W]
    whole = there[F] & np.where(there[B], halves == 0, halves == 2)
    wrong = np.argwhere((whole != taken[:, None, :]) | (taken.sum(axis=0) != 1))
    if len(wrong):
        number, stage, microbatch = map(int, wrong[0])
        raise ScheduleError(
            f"stage {stage} does not train on microbatch {microbatch} once",
            where=f"copy {number} of the model",
            why="one copy runs, on every stage, F and then B, or F, I and W",
            todo="add the actions that are missing, leave out those that are double",
        )

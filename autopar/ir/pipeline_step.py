"""Step: the complete rows of a pipeline, all that every rank does in one period of its schedule.

A synchronous (flushed) schedule ends every step with an update, and its rows are one step. An
asynchronous schedule continues from step to step, and its rows are one period of the steady state.
Negative numbers name microbatches of previous periods, `B0.-1`. In the first periods, actions of
microbatches before the first one are left out (the warm-up); after the last period, the rows run
without new microbatches (the drain). `unrolled` writes both out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopar.ir.action import ALL, COMPUTE, SYNC_AWAIT, TRANSFER, UPDATE, Action, Row, format_row

Queue = Literal["link", "rank"]
Placed = tuple[int, int]  # stage, copy


class Edge(NamedTuple):
    """A border that values cross.

    Attributes:
        maker, reader: the stages.
        gradient: whether gradients go back.
    """

    maker: int
    reader: int
    gradient: bool = True


@dataclass(frozen=True)
class Wiring:
    """Connections between the stages of a model.

    Attributes:
        edges: the producing and the reading stage of each transfer.
        tied: for each stage, the keys of the trained parameters that other stages also hold.
        axes: for each stage, the axes of its mesh with several devices; () if they do not matter.
    """

    edges: tuple[Edge, ...]
    tied: tuple[tuple[str, ...], ...]
    axes: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def chain(cls, stages: int) -> Wiring:
        """Returns the wiring of stages that each read from the previous one and share nothing."""
        return cls(tuple(Edge(n, n + 1) for n in range(stages - 1)), ((),) * stages)

    def needs(self, action: Action) -> tuple[tuple[Action, ...], ...]:
        """Returns the actions that must precede a compute action; as `action.dependencies`."""
        kind, stage, batch, copy = action[:4]
        if kind == "F":
            return tuple((Action("F", m, batch, copy),) for m, r, _ in self.edges if r == stage)
        if kind == "W":
            return ((Action("I", stage, batch, copy),),)
        found = [(Action("F", stage, batch, copy),)]
        for maker, reader, gradient in self.edges:
            if maker == stage and gradient:
                found.append(tuple(Action(half, reader, batch, copy) for half in "BI"))  # type: ignore[arg-type]
        return tuple(found)

    def __str__(self) -> str:
        """E.g. "0>1 1>2 0>2(no gradient)"."""
        return " ".join(f"{m}>{r}{'' if back else '(no gradient)'}" for m, r, back in self.edges)


@dataclass(frozen=True)
class Adjustment:
    """Corrections for stale weights (arXiv:1910.05124, section 3).

    Attributes:
        delays: mean age, in updates, of the weights of each stage's forwards.
        annealed: number of updates over which the learning rate of a stage, initially divided by
            its delay, rises to its usual value; 0 for no change of the learning rate.
        decay: decay of the velocity by which backwards correct the weights; 0 for no correction.
    """

    delays: tuple[float, ...] = ()
    annealed: int = 0
    decay: float = 0.0

    def rate(self, stage: int, update: int) -> float:
        """Returns the factor of a stage's learning rate in an update, counted from 0."""
        if update >= self.annealed:
            return 1.0
        return math.pow(max(self.delays[stage], 1.0), update / self.annealed - 1.0)

    def kept(self, stage: int) -> float:
        """Returns the share of its velocity that a stage keeps in an update."""
        return math.pow(self.decay, 1 / self.delays[stage])


NO_ADJUSTMENT = Adjustment()


@dataclass(frozen=True)
class Step:
    """All that every rank does, transfers, synchronisation and updates included.

    Attributes:
        rows: rows of the ranks, in the order in which each runs its actions, or posts them.
        placement: `placement[copy][stage]` is the rank that holds that copy of that stage.
        microbatches: number in a period.
        wiring: wiring of the model.
        queue: the kind of queue for which the order of transfers is made, see
            `inter_op/complete.py`.
    """

    rows: tuple[Row, ...]
    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    wiring: Wiring = field(repr=False)
    queue: Queue = "link"

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement[0])

    @property
    def flushes(self) -> bool:
        """Returns whether every period ends with an update of all stages."""
        return flushes(self.rows)

    def peer(self, action: Action) -> int:
        """The rank that a transfer goes to or comes from."""
        return self.placement[action.copy][action.partner]

    def unrolled(self, periods: int) -> Step:
        """Returns the rows of `periods` periods, with warm-up and drain, as one period."""
        rows = unrolled(self.rows, self.microbatches, periods)
        return Step(rows, self.placement, periods * self.microbatches, self.wiring, self.queue)

    def __str__(self) -> str:
        """One line a rank: "0: F0.0 SEND_F0.0 RECV_B0.0 B0.0 SYNC0 UPDATE0"."""
        return "\n".join(f"{rank}: {format_row(row)}" for rank, row in enumerate(self.rows))


def flushes(rows: Sequence[Row]) -> bool:
    """Returns whether rows end with an update of all stages, with nothing left in flight."""
    updates = [action.microbatch == ALL for row in rows for action in row if action.kind == UPDATE]
    return all(updates)


def unrolled(rows: Sequence[Row], microbatches: int, periods: int) -> tuple[Row, ...]:
    """Returns the rows of `periods` periods, including warm-up and drain.

    Args:
        rows: rows of one period.
        microbatches: number in a period.
        periods: in which new microbatches come; of a flushed schedule 1.
    """
    if flushes(rows) and periods == 1:
        return tuple(rows)
    drain = draining(rows, microbatches)
    return tuple(
        tuple(
            moved
            for period in range(periods + drain)
            for moved in at_period(row, microbatches, period)
            if moved.microbatch < periods * microbatches
        )
        for row in rows
    )


def draining(rows: Sequence[Row], microbatches: int) -> int:
    """Returns for how many periods rows run without new microbatches to finish the last ones."""
    behind = -min((a.microbatch for row in rows for a in row if a.microbatch != ALL), default=0)
    return -(-max(behind, 0) // microbatches)


def at_period(row: Row, microbatches: int, period: int) -> Row:
    """Returns a row as it runs in a period, microbatches numbered from the first of the run."""
    if not period and all(action.microbatch >= 0 for action in row):
        return row
    first = period * microbatches
    moved = (
        action
        if action.microbatch == ALL
        else action._replace(microbatch=first + action.microbatch)
        for action in row
    )
    return tuple(action for action in moved if action.microbatch == ALL or action.microbatch >= 0)


def versions(rows: Sequence[Row]) -> dict[Placed, int]:
    """Returns how many versions of its weights each stage holds: the oldest that it uses counts."""
    found: dict[Placed, int] = {}
    for row in rows:
        for action in row:
            if action.kind in COMPUTE:
                key = action.stage, action.copy
                found[key] = max(found.get(key, 1), action.age + 1)
    return found


def ahead(rows: Sequence[Row], microbatches: int) -> int:
    """Returns how many periods a replica may be ahead of the others: until it awaits their sums."""
    awaited = [a.microbatch for row in rows for a in row if a.kind == SYNC_AWAIT]
    return max((-(batch // microbatches) for batch in awaited if batch != ALL), default=0)


def in_update(rows: Sequence[Row]) -> dict[Placed, int]:
    """Returns the backwards of each stage whose gradients one update takes."""
    backwards: Counter[Placed] = Counter()
    updates: Counter[Placed] = Counter()
    for row in rows:
        for action in row:
            if action.kind in "BW":
                backwards[action.stage, action.copy] += 1
            elif action.kind == UPDATE:
                updates[action.stage, action.copy] += 1
    return {key: count // max(updates[key], 1) for key, count in backwards.items()}


def forwards(row: Row) -> Row:
    """Returns the actions of a row that evaluation runs: forwards of the period, with transfers."""
    kept = ("F", *(kind for kind in TRANSFER if kind.endswith("F")))
    return tuple(a._replace(age=0) for a in row if a.kind in kept and a.microbatch >= 0)

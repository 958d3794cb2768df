"""Schedules as values: the order of computation on each rank; `complete.py` adds the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

from autopar.errors import ScheduleError
from autopar.ir.action import Action, Row, format_row
from autopar.ir.pipeline_step import NO_ADJUSTMENT, Adjustment

__all__ = ["Row", "Rows", "Schedule", "Times", "check_sizes", "fraction", "line", "loop", "vee"]


class Rows(Sequence[Row]):
    """The rows of all ranks, built on first access, because the planner only reads the sizes."""

    def __init__(self, make: Callable[[], Sequence[Row]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[Row, ...]:
        return tuple(self._make())

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> Row: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, at: int | slice) -> Row | tuple[Row, ...]:
        return self._made[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)


class Times(NamedTuple):
    """Seconds per microbatch of one stage, where all stages are equal.

    A whole backward takes `input + weight`.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    @property
    def total(self) -> float:
        """Seconds of one forward and backward."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class Schedule:
    """The computation of every rank in one training step, or in one period.

    An asynchronous schedule runs across steps, so the pipeline never drains. Its rows are one
    period of the steady state and include the weight updates; see
    `ir/pipeline_step.py`.

    Attributes:
        name: name of the schedule.
        stages: number of stages.
        microbatches: per step, over all replicas; or per period.
        rows: the actions (F, B, I, W) of each rank in order, plus UPDATE where the schedule does
            not flush. Rows carry no times: an action runs once its predecessor has finished and its
            inputs are available.
        placement: `placement[copy][stage]` is the rank of that stage of that replica.
        in_flight: for each rank, the maximum number of forwards whose backward has not finished;
            each keeps the activations of one stage and one microbatch.
        bubble: the published closed form of the idle fraction, given the Times of equal stages
            without transfers; None where none is published for those sizes or times.
        joined: the published bubble counts the time between the first and last action of each
            rank, as if the next step started as soon as a rank is ready (arXiv:2401.10241,
            section 4: the optimizer does not wait for other ranks). Otherwise it counts the whole
            step.
        flushes: whether a step ends with an update of all stages, before the next one starts.
        warm_up: periods until the steady state; 0 where a schedule flushes.
        versions: weight versions that each stage keeps, by stage; () for one everywhere.
        staleness: by stage, the maximum number of updates by which the weights that a gradient was
            computed with are older than those that it updates; () for 0 everywhere.
        stashes: whether a backward uses the weights of its forward.
        pending: number of updates whose gradients are in transit between replicas at a time.
        outer: number of outermost axes of a stage's mesh over which gradients are in transit, and
            over the others they are summed at once; 0 if they are in transit over all.
        adjustment: the compensation for stale weights in the update.
        first: the number of initial periods that run another schedule, and that schedule; None if
            there are none.
    """

    name: str
    stages: int
    microbatches: int
    rows: Sequence[Row]
    placement: tuple[tuple[int, ...], ...]
    in_flight: tuple[int, ...]
    bubble: Callable[[Times], float | None] = field(repr=False, compare=False)
    joined: bool = False
    flushes: bool = True
    warm_up: int = 0
    versions: tuple[int, ...] = ()
    staleness: tuple[int, ...] = ()
    stashes: bool = True
    pending: int = 0
    outer: int = 0
    adjustment: Adjustment = NO_ADJUSTMENT
    first: tuple[int, Schedule] | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks; a group of devices that work together counts as one."""
        return 1 + max(max(ranks) for ranks in self.placement)

    @property
    def copies(self) -> int:
        """Number of model replicas."""
        return len(self.placement)

    @cached_property
    def splits_backward(self) -> bool:
        """Returns whether backwards are split into input (I) and weight (W) backwards."""
        return any(action.kind == "I" for row in self.rows for action in row)

    def half_backward(self, backward: float, again: float) -> float:
        """Returns the seconds of one half of a backward.

        Args:
            backward: seconds of a whole backward.
            again: seconds of its recomputation, which both halves of a split backward need.
        """
        return (backward + (again if self.splits_backward else 0.0)) / 2

    @cached_property
    def holds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (stage, copy) pairs of each rank, in stage order."""
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for copy, ranks in enumerate(self.placement):
            for stage, rank in enumerate(ranks):
                held[rank].append((stage, copy))
        return tuple(tuple(sorted(pairs)) for pairs in held)

    def rank_of(self, action: Action) -> int:
        """Returns the rank that runs an action."""
        return self.placement[action.copy][action.stage]

    def __str__(self) -> str:
        """Formats the rows, one line per rank: "0: F0.0 F0.1 B0.0 B0.1"."""
        return "\n".join(f"{rank}: {format_row(row)}" for rank, row in enumerate(self.rows))


def check_sizes(name: str, ranks: int, microbatches: int) -> None:
    """Checks that there is at least one rank and one microbatch.

    Raises:
        ScheduleError: there is no rank or no microbatch.
    """
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"{name}: {ranks} ranks and {microbatches} microbatches",
            why="a pipeline has at least one of each",
            todo="give positive numbers",
        )


def line(stages: int) -> tuple[tuple[int, ...], ...]:
    """Returns the placement with one stage per rank."""
    return (tuple(range(stages)),)


def loop(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the placement with `chunks` stages per rank, assigned round-robin."""
    return (tuple(range(ranks)) * chunks,)


def vee(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the V-shaped placement: two stages per rank, down to the last rank and back."""
    return ((*range(ranks), *reversed(range(ranks))),)


def fraction(idle: float, busy: float) -> float:
    """Returns the idle fraction of a rank, given its idle and busy seconds."""
    return idle / (idle + busy) if idle else 0.0

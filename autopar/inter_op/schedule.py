"""Schedule: which rank computes what in which order, as a value; see `complete.py` for the rest."""

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
    """The rows of ranks, made when they are first looked at: who plans asks for sizes only."""

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
    """Seconds of one stage on one microbatch, where all stages are equal.

    A whole backward takes `input + weight`.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline computes in one training step, or in one period.

    A schedule that does not flush goes on from step to step: the pipeline never runs dry. Its rows
    are one period of the steady state, with the updates of weights in them; see
    `ir/pipeline_step.py`.

    Attributes:
        name: of the schedule.
        stages: number of stages that the model is cut into.
        microbatches: in a step, of all copies together; or in a period.
        rows: the actions (F, B, I, W) of each rank in their order, and UPDATE where the schedule
            does not flush. Nothing in them says when an action runs: it runs once the one before it
            has ended and what it needs is there.
        placement: `placement[copy][stage]` is the rank that holds that copy of that stage.
        in_flight: for each rank, how many forwards at most are waiting for the end of their
            backward at a time; each keeps the activations of one stage and one microbatch.
        bubble: the published closed form of the part of the time that ranks are idle, given the
            Times of equal stages without transfers; None where none is published for those sizes
            or times.
        joined: the published bubble counts the time between a rank's own first and last action,
            as if the next step began wherever a rank is ready (arXiv:2401.10241, section 4: the
            optimizer does not wait for other ranks). Otherwise it counts the whole step.
        flushes: whether a step ends with an update of all stages, before the next one begins.
        warm_up: periods until the rows are those of the steady state; 0 where a schedule flushes.
        versions: of the weights that each stage holds, by stage; () for one everywhere.
        staleness: by how many updates at most the weights behind a gradient are older than those
            that it updates, by stage; () for 0 everywhere.
        stashes: whether a backward runs on the weights that its forward saw.
        pending: of how many updates gradients are under way between replicas at a time.
        adjustment: what makes up for stale weights where they are updated.
        first: periods at the beginning that run by another schedule, and which; None for none.
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
    adjustment: Adjustment = NO_ADJUSTMENT
    first: tuple[int, Schedule] | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks, or of groups of devices that work as one."""
        return 1 + max(max(ranks) for ranks in self.placement)

    @property
    def copies(self) -> int:
        """How often the model exists."""
        return len(self.placement)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether there are input backwards (I) and weight backwards (W)."""
        return any(action.kind == "I" for row in self.rows for action in row)

    @cached_property
    def holds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank the (stage, copy) pairs that it holds, in the order of stages."""
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for copy, ranks in enumerate(self.placement):
            for stage, rank in enumerate(ranks):
                held[rank].append((stage, copy))
        return tuple(tuple(sorted(pairs)) for pairs in held)

    def rank_of(self, action: Action) -> int:
        """The rank that runs an action."""
        return self.placement[action.copy][action.stage]

    def __str__(self) -> str:
        """One line a rank: "0: F0.0 F0.1 B0.0 B0.1"."""
        return "\n".join(f"{rank}: {format_row(row)}" for rank, row in enumerate(self.rows))


def check_sizes(name: str, ranks: int, microbatches: int) -> None:
    """Refuse what no schedule can be made for.

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
    """Returns the placement of one stage on each rank."""
    return (tuple(range(stages)),)


def loop(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the placement of `chunks` stages on each rank, dealt out like cards."""
    return (tuple(range(ranks)) * chunks,)


def vee(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the placement of two stages on each rank, to the last rank and back to the first."""
    return ((*range(ranks), *reversed(range(ranks))),)


def fraction(idle: float, busy: float) -> float:
    """Returns which part of a rank's time it is idle, given both in seconds."""
    return idle / (idle + busy) if idle else 0.0

"""Inputs and results of a stage search, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.inter_op.submeshes import SubMesh


@dataclass(frozen=True)
class Candidate:
    """One strategy that runs a range of layers on a sub-mesh, with the figures of one device.

    Attributes:
        forward, backward: seconds per microbatch.
        once: additional seconds per step: the optimizer and the part of gradient synchronisation
            that does not overlap.
        fixed: bytes of parameters, gradients and optimizer state.
        per_microbatch: bytes kept for each microbatch whose backward has not finished.
        transient: bytes needed temporarily on top.
        label: identifies the strategy (its logical mesh) to the caller.
        recompute: recomputation of blocks, "none" or "full".
        sums: seconds of gradient synchronisation that overlaps with later steps.
        sent: seconds of collectives per microbatch, in `forward` and `backward`.
        again: seconds of the recomputation in `backward`; both halves of a split backward need it.
    """

    forward: float
    backward: float = 0.0
    once: float = 0.0
    fixed: float = 0.0
    per_microbatch: float = 0.0
    transient: float = 0.0
    label: str = ""
    recompute: str = "none"
    sums: float = 0.0
    sent: float = 0.0
    again: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of one forward and backward."""
        return self.forward + self.backward

    def kept(self, in_flight: float) -> float:
        """Returns the bytes kept throughout with `in_flight` microbatches in flight."""
        return self.fixed + in_flight * self.per_microbatch

    def memory(self, in_flight: float) -> float:
        """Returns the peak bytes with `in_flight` microbatches in flight."""
        return self.kept(in_flight) + self.transient


def _one(_stages: int, _microbatches: int) -> float:
    return 1.0


def _always(_stages: int, _microbatches: int) -> bool:
    return True


def _straight(rank: int, _stages: int) -> tuple[int, ...]:
    return (rank,)


@dataclass(frozen=True)
class Law:
    """The figures of a schedule that a stage search needs.

    A step takes  fill * (sum of t + sum of transfers) + max((B - fill) * t + once)  seconds, with B
    microbatches and t the seconds that a rank works on one microbatch. With fill = 1 and without
    transfers and `once` this is Alpa's formula, sum of t + (B - 1) * max t.

    Attributes:
        name: name of the schedule.
        in_flight: maps (rank counted from the end, starting at 1; ranks; microbatches) to the
            number of microbatches whose activations are kept at a time, relative to all layers of
            the rank; fractional where a rank keeps only some of its chunks.
        fill: maps (ranks, microbatches) to the fraction of the other ranks' times that adds to the
            step: 1 for GPipe and 1F1B, 1 / chunks for interleaved schedules, less where weight
            gradients fill the gaps.
        exposed: fraction, at most 1, of the incoming transfers that a rank waits for in every
            microbatch: 1/2 for 1F1B, where two consecutive actions wait for one round trip.
        fits: maps (ranks, microbatches) to whether the schedule supports them.
        holds: maps (rank, ranks) to the chunks of a rank, from 0 to ranks * chunks - 1.
        chunks: chunks per rank; schedules with several chunks cut the layers evenly.
        copies: number of model replicas, each for its share of the microbatches.
    """

    name: str
    in_flight: Callable[[int, int, int], float] = field(repr=False)
    fill: Callable[[int, int], float] = field(default=_one, repr=False)
    exposed: float = 0.5
    fits: Callable[[int, int], bool] = field(default=_always, repr=False)
    holds: Callable[[int, int], tuple[int, ...]] = field(default=_straight, repr=False)
    chunks: int = 1
    copies: int = 1


@dataclass(frozen=True)
class Chunk:
    """Layers `first` to `last`, inclusive, run by the strategy `candidate`."""

    first: int
    last: int
    candidate: Candidate


@dataclass(frozen=True)
class Stage:
    """The work of one sub-mesh.

    Attributes:
        submesh: shape of its devices.
        chunks: its layers, one contiguous chunk unless the schedule uses several.
        seconds: forward and backward of one microbatch.
        once: additional seconds per step.
        memory: peak bytes per device.
        in_flight: microbatches in flight, see `Law`.
    """

    submesh: SubMesh
    chunks: tuple[Chunk, ...]
    seconds: float
    once: float
    memory: float
    in_flight: float = 1.0


@dataclass(frozen=True)
class Pipeline:
    """A partition of a model on a cluster, with its predicted times.

    Attributes:
        schedule: name of the law.
        microbatches: per step.
        stages: in rank order.
        seconds: per step.
        transfers: seconds to transfer one microbatch across all borders and back.
        bottleneck: seconds that the slowest stage is busy.
    """

    schedule: str
    microbatches: int
    stages: tuple[Stage, ...]
    seconds: float
    transfers: float
    bottleneck: float


@dataclass(frozen=True)
class StageSearchResult:
    """The result of a stage search.

    Attributes:
        best: the fastest pipeline.
        others: the fastest known pipeline of every other schedule and number of microbatches, and
            of every other number of stages with the best schedule and microbatches, if it takes
            less than twice as long; fastest first, `doubts` included. All prices are known.
        bound: lower bound on the seconds of any pipeline; `best.seconds` if proved optimal.
        calls: number of stage costs requested.
        families: number of distinct combinations of sub-mesh, microbatches and set of layers
            requested; equal layers count once.
    """

    best: Pipeline
    others: tuple[Pipeline, ...]
    bound: float
    calls: int
    families: int

    @property
    def gap(self) -> float:
        """Largest possible improvement of the best pipeline, as a fraction of its time."""
        return 1 - self.bound / self.best.seconds if self.best.seconds else 0.0


@dataclass(frozen=True)
class Progress:
    """Progress of a search: requested prices, best seconds so far and their lower bound."""

    calls: int
    seconds: float
    bound: float
    doing: str

"""What a search for stages is told and what it answers, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.inter_op.submeshes import SubMesh


@dataclass(frozen=True)
class Candidate:
    """One way to run a range of layers on a sub-mesh, by one device's figures.

    Attributes:
        forward, backward: seconds a microbatch.
        once: seconds a step besides, for what is not hidden of gradient synchronisation and for the
            optimizer.
        fixed: bytes of parameters, gradients and optimizer state.
        per_microbatch: bytes kept for each microbatch whose backward has not ended.
        transient: bytes that are needed for a while, on top.
        label: which way it is (its logical mesh), for who asked.
        recompute: what blocks compute again, "none" or "full".
    """

    forward: float
    backward: float = 0.0
    once: float = 0.0
    fixed: float = 0.0
    per_microbatch: float = 0.0
    transient: float = 0.0
    label: str = ""
    recompute: str = "none"

    @property
    def seconds(self) -> float:
        """Of a forward and a backward."""
        return self.forward + self.backward

    def kept(self, in_flight: float) -> float:
        """Bytes that are held all the while, with so many microbatches in flight."""
        return self.fixed + in_flight * self.per_microbatch

    def memory(self, in_flight: float) -> float:
        """Peak bytes with so many microbatches in flight."""
        return self.kept(in_flight) + self.transient


def _one(_stages: int, _microbatches: int) -> float:
    return 1.0


def _always(_stages: int, _microbatches: int) -> bool:
    return True


def _straight(rank: int, _stages: int) -> tuple[int, ...]:
    return (rank,)


@dataclass(frozen=True)
class Law:
    """What a search has to know of a schedule.

    The step takes  fill * (sum of t + sum of transfers) + max((B - fill) * t + once)  seconds, with
    B microbatches, t the seconds of a rank's work on one of them. With fill = 1 and transfers and
    `once` left out that is Alpa's formula, sum of t + (B - 1) * max t.

    Attributes:
        name: of the schedule.
        in_flight: (rank counted from the end, 1 the last; ranks; microbatches) -> microbatches
            whose activations are kept at a time, in units of all that a rank holds; a fraction
            where a rank keeps only some of its chunks.
        fill: (ranks, microbatches) -> which part of the other ranks' times adds to the step: 1 for
            GPipe and 1F1B, 1 / chunks for interleaved ones, less where weight gradients fill gaps.
        exposed: which part of the transfers into a rank it waits for in every microbatch: 1/2 for
            1F1B, where a rank's two neighbouring actions wait for a round trip between them.
        fits: (ranks, microbatches) -> whether the schedule exists for them.
        holds: (rank, ranks) -> the chunks that a rank holds, of chunks 0 to ranks * chunks - 1.
        chunks: how many each rank holds; those of more than one are cut evenly.
        copies: of the model, each for its share of the microbatches.
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
    """Layers `first` to `last`, both counted in, run as `candidate` says."""

    first: int
    last: int
    candidate: Candidate


@dataclass(frozen=True)
class Stage:
    """What the devices of one sub-mesh run.

    Attributes:
        submesh: the devices' shape.
        chunks: the layers, in one piece unless the schedule holds several.
        seconds: of a forward and a backward of one microbatch.
        once: seconds a step besides.
        memory: peak bytes of a device.
        in_flight: microbatches, see `Law`.
    """

    submesh: SubMesh
    chunks: tuple[Chunk, ...]
    seconds: float
    once: float
    memory: float
    in_flight: float = 1.0


@dataclass(frozen=True)
class Pipeline:
    """A model on a cluster: what is chosen, and what it takes by the schedule's formula.

    Attributes:
        schedule: name of the law.
        microbatches: of a step.
        stages: in the order of the ranks.
        seconds: of a step.
        transfers: seconds of one microbatch's way over all borders and back.
        bottleneck: seconds that the slowest stage is busy.
    """

    schedule: str
    microbatches: int
    stages: tuple[Stage, ...]
    seconds: float
    transfers: float
    bottleneck: float


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: the fastest pipeline.
        others: the fastest known of every other schedule and number of microbatches, and of every
            other number of stages with those of the best, if it takes less than twice as long; the
            fastest first. Every price in them was asked for.
        bound: no pipeline takes less than so many seconds; `best.seconds` if it is proved best.
        calls: how many stage costs were asked for.
        families: of how many kinds they were: sub-mesh, microbatches and which layers, however many
            equal ones.
    """

    best: Pipeline
    others: tuple[Pipeline, ...]
    bound: float
    calls: int
    families: int

    @property
    def gap(self) -> float:
        """By which part of its time the best pipeline could at most be improved."""
        return 1 - self.bound / self.best.seconds if self.best.seconds else 0.0


@dataclass(frozen=True)
class Progress:
    """How far a search is: what it asked, the best pipeline's seconds so far and their bound."""

    calls: int
    seconds: float
    bound: float
    doing: str

"""Seconds of a collective by an algorithm: played at a few sizes, straight between them.

A played time is made of latencies and of bytes, so that it is straight in the size but where
another link becomes the slowest; sizes four times as large as one another are played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from autopar.cost.algorithms import Level, group_size
from autopar.cost.collective_seconds import collective_seconds
from autopar.cost.collectives import algorithms
from autopar.cost.device import Device
from autopar.cost.programs.play import flow_of, play
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm, ChosenAlgorithms, ChosenRow
from autopar.ir.mesh import Mesh

MOST_RANKS = 128  # of a group whose algorithms are compared; of larger ones the library's is taken
MOST_MESSAGES = 20_000
PIECES = (4, 16)  # into which chunks are cut, besides none
NEAR = 2.0  # what is this many times as slow as the best is not tried in pieces
SIZES = tuple(1 << power for power in range(10, 33))
COMPARED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")  # that plans have
GAIN = 1.02  # an algorithm that is no faster than this is not worth leaving the library for


class Pace(NamedTuple):
    """What messages take besides the figures of the links.

    Attributes:
        in_step: whether the calls of a rank follow one another on a stream.
        adding: seconds in which a receiver adds a byte.
        base: seconds of each message.
    """

    in_step: bool
    adding: float
    base: float

    @classmethod
    def of(cls, device: Device, levels: tuple[Level, ...]) -> Pace:
        """That of the runtime on a device (see `autopar/runtime/communication/played.py`).

        NCCL's calls follow one another on a stream, each with what NCCL takes before its first
        byte and a kernel that adds; gloo's messages go side by side. Of a byte that is added two
        are read and one is written.
        """
        adding = 3 / (device.memory_bandwidth * device.memory_efficiency)
        protocols = levels[-1].library
        if not protocols.tree:
            return cls(False, adding, 0.0)
        return cls(True, adding, protocols.ring[-1].base + device.launch)


def played_seconds(
    kind: str, by: Algorithm, levels: tuple[Level, ...], nbytes: float, pace: Pace
) -> float:
    """Seconds of `kind` by an algorithm among the devices of `levels`; none for a lone device.

    Args:
        kind: the collective.
        by: the algorithm.
        levels: that the devices span, outermost first.
        nbytes: what each device brings to it.
        pace: what messages take besides.

    Raises:
        CollectiveError: there is no such algorithm, or it is for another number of devices.
    """
    if group_size(levels) == 1:
        return 0.0
    shape = by.over(_sizes(levels))
    low, high = 0, 1 << 10
    while high < nbytes and high < 1 << 40:
        low, high = high, 4 * high
    known = Algorithm(by.name, by.pieces, shape)
    first, second = (_anchor(kind, known, levels, size, pace) for size in (low, high))
    return first + (second - first) * (nbytes - low) / (high - low)


@lru_cache(maxsize=65536)
def _anchor(kind: str, by: Algorithm, levels: tuple[Level, ...], nbytes: int, pace: Pace) -> float:
    flow = flow_of(kind, by.name, by.shape, by.pieces, pace.in_step)
    return play(flow, levels, nbytes, pace.adding, pace.base).seconds


def choose(
    mesh: Mesh, groups: Iterator[tuple[tuple[str, ...], tuple[Level, ...]]], device: Device
) -> ChosenAlgorithms:
    """The cheapest algorithm of every collective by its size, the library's own included.

    Args:
        mesh: the devices.
        groups: axes, and the levels that groups along them span.
        device: of the mesh.
    """
    rows: list[ChosenRow] = []
    for axes, levels in groups:
        if not 2 < group_size(levels) <= MOST_RANKS:
            continue
        pace = Pace.of(device, levels)
        sizes = tuple(size for name in axes if (size := mesh.axis_size(name)) > 1)
        shape = _sizes(levels)
        for kind in COMPARED:
            ways = [*_ways(kind, shape, () if shape == sizes else shape)]
            before = LIBRARY
            for nbytes in SIZES:
                best = _best(kind, ways, levels, nbytes, pace)
                if best != before:
                    rows.append(ChosenRow(kind, axes, nbytes, best))
                before = best
    return ChosenAlgorithms(tuple(rows))


def _best(
    kind: str, ways: list[Algorithm], levels: tuple[Level, ...], nbytes: int, pace: Pace
) -> str:
    best, least = LIBRARY, collective_seconds(kind, levels, nbytes) / GAIN
    near: list[Algorithm] = []
    for way in ways:
        if played_seconds(kind, way, levels, 0, pace) >= least:
            continue  # its latencies alone take longer
        seconds = played_seconds(kind, way, levels, nbytes, pace)
        near += [way] if seconds < NEAR * least else []
        if seconds < least:
            best, least = str(way), seconds
    for way in near:
        messages = len(flow_of(kind, way.name, way.over(_sizes(levels))).waits)
        for pieces in (n for n in PIECES if n * messages <= MOST_MESSAGES):
            finer = replace(way, pieces=pieces)
            seconds = played_seconds(kind, finer, levels, nbytes, pace)
            if seconds < least:
                best, least = str(finer), seconds
    return best


def _ways(kind: str, shape: tuple[int, ...], named: tuple[int, ...]) -> Iterator[Algorithm]:
    """The algorithms that are compared; `named` is the shape that a call has to say."""
    for name in algorithms(kind):
        if len(flow_of(kind, name, shape).waits) <= MOST_MESSAGES:
            yield Algorithm(name, 1, named)


def _sizes(levels: tuple[Level, ...]) -> tuple[int, ...]:
    return tuple(level.size for level in levels)

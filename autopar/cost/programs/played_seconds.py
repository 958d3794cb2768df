"""Prices a collective under an algorithm: plays a few sizes and interpolates linearly between them.

A played time is the sum of latencies and transfers, so it is linear in the size except where the
bottleneck moves to another link. Sizes grow by a factor of four.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autopar.cost.algorithms import Level, group_size
from autopar.cost.device import Device
from autopar.cost.programs.play import flow_of, play
from autopar.ir.chosen_algorithms import Algorithm


class Pace(NamedTuple):
    """Costs of messages beyond latency and bandwidth of the links.

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
        """Returns the costs on a device in `autopar/runtime/communication/programmed.py`.

        NCCL's calls follow one another on a stream; each costs NCCL's time before the first byte
        and the launch of a kernel that adds. gloo's messages run side by side. Adding a byte reads
        two and writes one.
        """
        adding = 3 / (device.memory_bandwidth * device.memory_efficiency)
        protocols = levels[-1].library
        if not protocols.tree:
            return cls(False, adding, 0.0)
        return cls(True, adding, protocols.ring[-1].base + device.launch)


def played_seconds(
    kind: str, by: Algorithm, levels: tuple[Level, ...], nbytes: float, pace: Pace
) -> float:
    """Returns the seconds of `kind` under an algorithm over `levels`; 0 for a single device.

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


def _sizes(levels: tuple[Level, ...]) -> tuple[int, ...]:
    return tuple(level.size for level in levels)

"""Prices a collective under an algorithm: simulates a few sizes and interpolates linearly.

A simulated time is the sum of latencies and transfers, so it is linear in the size except where the
bottleneck moves to another link. Sizes grow by a factor of four.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autopar.cost.algorithms import Level, group_size
from autopar.cost.device import Device
from autopar.cost.programs.message_simulation import flow_of, simulate_messages
from autopar.ir.chosen_algorithms import Algorithm


class MessageCosts(NamedTuple):
    """Costs of messages beyond latency and bandwidth of the links.

    Attributes:
        in_step: whether the calls of a rank run one after the other, on a stream.
        adding: seconds per byte that a receiver adds.
        base: seconds of each message.
    """

    in_step: bool
    adding: float
    base: float

    @classmethod
    def of(cls, device: Device, levels: tuple[Level, ...]) -> MessageCosts:
        """Returns the costs of messages of `autopar/runtime/communication/programmed.py`.

        NCCL's calls run one after the other on a stream; each takes NCCL's time before the first
        byte, and the launch of the kernel that adds. gloo's messages run concurrently. Adding a
        byte reads two bytes and writes one.
        """
        adding = 3 / (device.memory_bandwidth * device.memory_efficiency)
        protocols = levels[-1].library
        if not protocols.tree:
            return cls(False, adding, 0.0)
        return cls(True, adding, protocols.ring[-1].base + device.launch)


def simulated_seconds(
    kind: str, by: Algorithm, levels: tuple[Level, ...], nbytes: float, pace: MessageCosts
) -> float:
    """Returns the seconds of `kind` under an algorithm over `levels`; 0 for a single device.

    Args:
        kind: the collective.
        by: the algorithm.
        levels: the levels that the devices span, outermost first.
        nbytes: payload of each device before the call.
        pace: further costs of messages.

    Raises:
        CollectiveError: the algorithm is unknown, or written for another number of devices.
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
def _anchor(
    kind: str, by: Algorithm, levels: tuple[Level, ...], nbytes: int, pace: MessageCosts
) -> float:
    flow = flow_of(kind, by.name, by.shape, by.pieces, pace.in_step)
    return simulate_messages(flow, levels, nbytes, pace.adding, pace.base).seconds


def _sizes(levels: tuple[Level, ...]) -> tuple[int, ...]:
    return tuple(level.size for level in levels)

"""The ways to run a stage that are worth knowing: faster than what needs as little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from autopar.inter_op.stage_values import Candidate

AGAIN = 1 / 3  # of a step is what all its forwards are computed again for, at most
EVEN = 0.01  # ways so close in seconds are as good, of the same problem
_SAME = 3e-3  # and of any


class Share(NamedTuple):
    """What a range of layers may take.

    Attributes:
        chunks: so many ranges share a device; but what they need for a while, each has in turn.
        in_flight: microbatches, ascending.
    """

    chunks: int
    in_flight: tuple[int, ...]

    def limit(self, memory: float, transient: float) -> float:
        """Bytes for what is kept, of a device that holds so many."""
        return (memory - transient) / self.chunks

    def fits(self, way: Candidate, in_flight: int, memory: float) -> bool:
        """Whether a way keeps no more than that."""
        return way.kept(in_flight) <= self.limit(memory, way.transient)


def along(
    share: Share,
    fastest: Callable[[int], Candidate | None],
    memory: float,
    worth: float,
) -> list[Candidate]:
    """The fastest ways for few and for many microbatches in flight, and where these differ between.

    Args:
        share: for what they are.
        fastest: how many of them -> the fastest way that fits.
        memory: bytes of a device.
        worth: what takes so many times the seconds of the first is not wanted.
    """
    levels = share.in_flight
    first = fastest(levels[0])
    if first is None:
        return []
    found = {0: first}

    def at(place: int) -> Candidate | None:
        fits = [way for way in found.values() if share.fits(way, levels[place], memory)]
        way = min(fits, key=lambda way: way.seconds) if fits else fastest(levels[place])
        return way if way and way.seconds <= worth * first.seconds else None

    low, high = 1, len(levels) - 1
    place = high
    while low <= high:  # the most that fits
        way = at(place)
        if way is None:
            high = place - 1
        else:
            found[place], low = way, place + 1
        place = (low + high + 1) // 2
    left = list(pairwise(sorted(found)))
    while left:
        low, high = left.pop()
        if high - low > 1 and found[high].seconds > (1 + EVEN) * found[low].seconds:
            middle = (low + high) // 2
            found[middle] = at(middle) or found[high]
            left += [(low, middle), (middle, high)]
    return list(found.values())


def front(found: Sequence[Candidate], microbatches: int) -> tuple[Candidate, ...]:
    """Candidates, the fastest first, but for those that need as much as one that is as fast.

    Args:
        found: candidates.
        microbatches: over which what a step does once is spread.
    """

    def seconds(way: Candidate) -> float:
        return way.seconds + way.once / microbatches

    kept: list[Candidate] = []
    for way in sorted(found, key=lambda way: (way.seconds, way.once)):
        if not any(
            seconds(other) <= (1 + _SAME) * seconds(way)
            and other.fixed + other.transient <= way.fixed + way.transient
            and other.per_microbatch <= way.per_microbatch
            for other in kept
        ):
            kept.append(way)
    return tuple(kept)


def partly(
    none: Candidate, full: Candidate, blocks: int, share: Share, in_flight: int, memory: float
) -> list[Candidate]:
    """One way with as many blocks computed again as must be, none if that is none or all of them.

    Args:
        none, full: the same choice, with no and with all blocks computed again.
        blocks: how many there are.
        share, memory: of a device, and its bytes.
        in_flight: microbatches.
    """
    if share.fits(none, in_flight, memory):
        return []
    most, least = none.kept(in_flight), full.kept(in_flight)
    room = share.limit(memory, max(none.transient, full.transient))
    if not least < most:
        return []
    again = max(math.ceil(blocks * (most - room) / (most - least)), 1)
    return [_between(none, full, again / blocks, f"full {again}")] if again < blocks else []


def _between(none: Candidate, full: Candidate, share: float, recompute: str) -> Candidate:
    """Figures are sums over blocks; what is needed for a while is that of one of them."""

    def mixed(one: float, other: float) -> float:
        return (1 - share) * one + share * other

    return replace(
        none,
        forward=mixed(none.forward, full.forward),
        backward=mixed(none.backward, full.backward),
        once=mixed(none.once, full.once),
        fixed=mixed(none.fixed, full.fixed),
        per_microbatch=mixed(none.per_microbatch, full.per_microbatch),
        transient=max(none.transient, full.transient),
        recompute=recompute,
    )

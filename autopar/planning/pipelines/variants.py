"""Keeps the candidates of a stage that no other one dominates in time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from autopar.inter_op.stage_values import Candidate

AGAIN = 1 / 3  # largest cost of recomputing all forwards, in units of a step
EVEN = 0.01  # relative difference at which candidates of one problem count as equally fast
_SAME = 3e-3  # the same for candidates of any problem


class Share(NamedTuple):
    """The share of a device that a range of layers has.

    Attributes:
        chunks: number of ranges that share a device; they use transient memory in turn.
        in_flight: numbers of microbatches in flight, ascending.
    """

    chunks: int
    in_flight: tuple[int, ...]

    def limit(self, memory: float, transient: float) -> float:
        """Returns the bytes for kept tensors of a chunk, on a device of `memory` bytes."""
        return (memory - transient) / self.chunks

    def fits(self, candidate: Candidate, in_flight: int, memory: float) -> bool:
        """Returns whether a candidate keeps no more than that."""
        return candidate.kept(in_flight) <= self.limit(memory, candidate.transient)


@dataclass(frozen=True)
class InFlight:
    """Numbers of microbatches that schedules keep in flight.

    Attributes:
        held: limit on a rank's layers times its microbatches in flight, in units of all layers.
        kept: (ranks, parts of the model, chunks of a rank) -> numbers of microbatches that ranks of
            such an even pipeline keep in flight under some schedule, ascending.
    """

    held: float = math.inf
    kept: Mapping[tuple[int, int, int], Sequence[int]] = field(default_factory=dict)


ANY_NUMBER = InFlight()


def along(
    share: Share,
    fastest: Callable[[int], Candidate | None],
    memory: float,
    worth: float,
) -> list[Candidate]:
    """Returns the fastest candidates for few and many microbatches in flight.

    Numbers between are added only if these two differ in seconds.

    Args:
        share: share of a device.
        fastest: number of microbatches in flight -> the fastest candidate that fits.
        memory: bytes of a device.
        worth: largest time of a candidate, in units of the first one's.
    """
    levels = share.in_flight
    first = fastest(levels[0])
    if first is None:
        return []
    by_level = {0: first}

    def at(place: int) -> Candidate | None:
        fits = [one for one in by_level.values() if share.fits(one, levels[place], memory)]
        one = min(fits, key=lambda one: one.seconds) if fits else fastest(levels[place])
        return one if one and one.seconds <= worth * first.seconds else None

    low, high = 1, len(levels) - 1
    place = high
    while low <= high:  # bisects for the most that fits
        one = at(place)
        if one is None:
            high = place - 1
        else:
            by_level[place], low = one, place + 1
        place = (low + high + 1) // 2
    left = list(pairwise(sorted(by_level)))
    while left:
        low, high = left.pop()
        if high - low > 1 and by_level[high].seconds > (1 + EVEN) * by_level[low].seconds:
            middle = (low + high) // 2
            by_level[middle] = at(middle) or by_level[high]
            left += [(low, middle), (middle, high)]
    return list(by_level.values())


def front(candidates: Sequence[Candidate], microbatches: int) -> tuple[Candidate, ...]:
    """Returns the candidates that no other one dominates, the fastest first.

    Args:
        candidates: to compare.
        microbatches: number of microbatches over which what a step does once is spread.
    """

    def seconds(candidate: Candidate) -> float:
        return candidate.seconds + candidate.once / microbatches

    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.once)):
        if not any(
            seconds(other) <= (1 + _SAME) * seconds(candidate)
            and other.fixed + other.transient <= candidate.fixed + candidate.transient
            and other.per_microbatch <= candidate.per_microbatch
            for other in kept
        ):
            kept.append(candidate)
    return tuple(kept)


def partly(
    none: Candidate, full: Candidate, blocks: int, share: Share, in_flight: int, memory: float
) -> list[Candidate]:
    """Returns a candidate that recomputes as few blocks as necessary, if these are some blocks.

    Args:
        none, full: the same choice, with no blocks and with all blocks recomputed.
        blocks: number of blocks.
        share: share of a device.
        in_flight: number of microbatches in flight.
        memory: bytes of a device.
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
    """Interpolates two candidates linearly, except that transient memory is that of one block."""

    def mixed(one: float, other: float) -> float:
        return (1 - share) * one + share * other

    return replace(
        none,
        forward=mixed(none.forward, full.forward),
        backward=mixed(none.backward, full.backward),
        once=mixed(none.once, full.once),
        sent=mixed(none.sent, full.sent),
        fixed=mixed(none.fixed, full.fixed),
        per_microbatch=mixed(none.per_microbatch, full.per_microbatch),
        transient=max(none.transient, full.transient),
        recompute=recompute,
    )

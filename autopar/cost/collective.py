"""Seconds of one collective: alpha-beta closed forms, one level of the network at a time.

With n devices, latency a and bandwidth b, sending m bytes takes a + m / b: the model of Thakur,
Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH" (IJHPCA 19(1),
2005), without the time of the additions. The 2 (n-1)/n nbytes that a ring all_reduce sends per
device are the least possible (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 69(2), 2009). Every device has links of its own on every level, so
the groups of one mesh axis do not slow each other down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.errors import CostError


class Level(NamedTuple):
    """One mesh axis as a collective sees it: devices, bytes/s and seconds a message."""

    size: int
    bandwidth: float
    latency: float


def all_gather(levels: Sequence[Level], nbytes: float) -> float:
    """Ring, (n-1) (a + shard / b); `nbytes` is the shard.

    Thakur et al., "Allgather". Levels: the outermost first, as the shards are still small there.
    """
    seconds = 0.0
    for size, bandwidth, latency in levels:
        seconds += (size - 1) * (latency + nbytes / bandwidth)
        nbytes *= size
    return seconds


def reduce_scatter(levels: Sequence[Level], nbytes: float) -> float:
    """Ring, (n-1) (a + nbytes / n / b): an all_gather run backwards.

    Thakur et al., "Reduce-Scatter". Levels: the innermost first, so the outer ones carry less.
    """
    return all_gather(levels, nbytes / math.prod(level.size for level in levels))


def all_reduce(levels: Sequence[Level], nbytes: float) -> float:
    """Ring, 2 (n-1) a + 2 (n-1)/n nbytes / b.

    Rabenseifner's reduce_scatter and all_gather (Thakur et al., "Reduce and Allreduce") along rings
    (Patarasuk & Yuan). Several levels: reduce_scatter on the innermost, all_reduce of what is left
    on the outer ones, all_gather on the innermost.
    """
    if not levels:
        return 0.0
    *outer, inner = levels
    n, bandwidth, latency = inner
    seconds = 2 * (n - 1) * latency + 2 * (n - 1) / n * nbytes / bandwidth
    return seconds + all_reduce(outer, nbytes / n)


def all_to_all(levels: Sequence[Level], nbytes: float) -> float:
    """Pairwise exchange, (n-1) a + (n-1)/n nbytes / b.

    Thakur et al., "Alltoall", long messages. Several levels: one exchange along each.
    """
    return sum(
        (size - 1) * latency + (size - 1) / size * nbytes / bandwidth
        for size, bandwidth, latency in levels
    )


def broadcast(levels: Sequence[Level], nbytes: float) -> float:
    """Scatter and ring all_gather, (ceil(log2 n) + n-1) a + 2 (n-1)/n nbytes / b.

    Thakur et al., "Broadcast", long messages (van de Geijn). Several levels: one after another.
    """
    return sum(
        (math.ceil(math.log2(size)) + size - 1) * latency
        + 2 * (size - 1) / size * nbytes / bandwidth
        for size, bandwidth, latency in levels
    )


def send(levels: Sequence[Level], nbytes: float) -> float:
    """One message, a + nbytes / b; over several levels that of the slowest one."""
    return max(
        (latency + nbytes / bandwidth for n, bandwidth, latency in levels if n > 1), default=0
    )


_FORMS: dict[str, Callable[[Sequence[Level], float], float]] = {
    form.__name__: form
    for form in (all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send)
}


def collective_seconds(kind: str, levels: Sequence[Level], nbytes: float) -> float:
    """Seconds of the collective called `kind`; a group of one device is free.

    Args:
        kind: the name of one of this file's functions.
        levels: the axes that it spans, outermost first.
        nbytes: the payload of each device before the call.

    Raises:
        CostError: no such collective.
    """
    if kind not in _FORMS:
        raise CostError(
            f"no price is known for the collective {kind!r}",
            why=f"the collectives are {', '.join(_FORMS)}",
        )
    return _FORMS[kind](levels, nbytes)

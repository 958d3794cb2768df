"""Seconds of one collective, by the algorithm and protocol that the library would choose.

NCCL predicts the time of each algorithm with each protocol and takes the fastest
(src/graph/tuning.cc); so does `collective_seconds`. A library without known protocols is assumed to
use the levels either one after another or all at once. Algorithms that no library chooses by itself
(H-Ring, HO-Ring, 2D torus under NCCL) are priced on request, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from autopar.cost.algorithms import (
    ALL_REDUCES,
    GATHERS,
    OTHERS,
    Form,
    Level,
    Levels,
    channels,
    group_size,
)
from autopar.cost.protocol import Protocol
from autopar.errors import CostError

__all__ = ["KINDS", "Level", "algorithms", "collective_seconds"]

_GATHERING = ("all_gather", "reduce_scatter", "all_reduce")
KINDS = (*_GATHERING, *OTHERS)
# Protocols by the names of algorithms; those of rings for all others.
_PROTOCOLS = {"tree": "tree", "pairwise": "direct", "message": "direct"}

# Algorithms that a library chooses from by itself: NCCL, and a library without known protocols.
_NCCL = {
    "all_gather": ("channels",),
    "reduce_scatter": ("channels",),
    "all_reduce": ("channels", "tree", "switch"),
    "all_to_all": ("pairwise",),
    "broadcast": ("chain",),
    "send": ("message",),
}
_PLAIN = {
    "all_gather": ("ring", "torus"),
    "reduce_scatter": ("ring", "torus"),
    "all_reduce": ("ring", "torus"),
    "all_to_all": ("pairwise",),
    "broadcast": ("scatter_gather",),
    "send": ("message",),
}


def algorithms(kind: str) -> dict[str, Form]:
    """Returns the algorithms for the collective `kind`: name -> (levels, payload) -> seconds.

    The payload is in bytes per device.

    Raises:
        CostError: no such collective.
    """
    if kind in OTHERS:
        return OTHERS[kind]
    if kind not in KINDS:
        raise CostError(
            f"unknown collective {kind!r}",
            why=f"the collectives are {', '.join(KINDS)}",
        )
    if kind == "all_gather":
        return GATHERS
    times = 2 if kind == "all_reduce" else 1
    forms = {name: _backwards(gather, times) for name, gather in GATHERS.items()}
    return {**forms, **ALL_REDUCES} if kind == "all_reduce" else forms


def _backwards(gather: Form, times: int) -> Form:
    """Returns a reduce_scatter (an all_gather run backwards), or with `times` 2 an all_reduce."""

    def run(levels: Levels, nbytes: float) -> float:
        shard = nbytes / group_size(levels)
        # Both directions in one call copy a device's own shard but once.
        once = partial(channels, copied=False) if gather is channels else gather
        return gather(levels, shard) + (times - 1) * once(levels, shard)

    return run


_FORMS = {kind: algorithms(kind) for kind in KINDS}


@lru_cache(maxsize=4096)
def _views(levels: tuple[Level, ...], of: str) -> tuple[tuple[float, tuple[Level, ...]], ...]:
    """Returns each protocol's seconds before the first byte and its view of the levels."""
    protocols = [getattr(level.library, of) or level.library.ring for level in levels]
    rows = zip(*protocols, strict=True)
    return tuple((row[-1].base, tuple(map(_through, levels, row))) for row in rows)


def _through(level: Level, protocol: Protocol) -> Level:
    return level._replace(
        bandwidth=level.bandwidth * protocol.bandwidth,
        alone=level.alone * protocol.bandwidth,
        latency=level.latency * protocol.latency,
    )


def collective_seconds(
    kind: str, levels: Sequence[Level], nbytes: float, algorithm: str | None = None
) -> float:
    """Returns the seconds of the collective `kind`; 0 for a group of one device.

    Args:
        kind: one of `KINDS`.
        levels: levels of the network that the group spans, outermost first.
        nbytes: payload in bytes per device before the call.
        algorithm: name of an algorithm; None for the fastest that the library chooses from.

    Raises:
        CostError: no such collective, or no such algorithm for it.
    """
    forms = _FORMS.get(kind) or algorithms(kind)
    if algorithm is not None and algorithm not in forms:
        raise CostError(
            f"{kind} has no algorithm {algorithm!r}",
            why=f"its algorithms are {', '.join(forms)}",
        )
    span: Levels = tuple(level for level in levels if level.size > 1)
    if not span:
        return 0.0
    known = bool(span[-1].library.tree)
    names = (_NCCL if known else _PLAIN)[kind] if algorithm is None else (algorithm,)
    return min(
        base + forms[name](view, nbytes)
        for name in names
        for base, view in _views(tuple(span), _PROTOCOLS.get(name, "ring"))
    )

"""Seconds of one collective: the algorithm and the protocol that the library would choose.

NCCL predicts the time of each of its algorithms with each of its protocols and takes the least
(src/graph/tuning.cc); so does `collective_seconds`. Of a library without protocols nothing is known
but that it may use the levels one after another or all at once. An algorithm that no library runs
by itself (H-Ring, HO-Ring, 2D torus under NCCL) is priced when it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autopar.cost.algorithms import (
    ALL_REDUCES,
    GATHERS,
    OTHERS,
    Form,
    Level,
    Levels,
    group_size,
)
from autopar.cost.protocol import Protocol
from autopar.errors import CostError

__all__ = ["KINDS", "Level", "algorithms", "collective_seconds"]

_GATHERING = ("all_gather", "reduce_scatter", "all_reduce")
KINDS = (*_GATHERING, *OTHERS)
_TREES = frozenset({"tree"})

# What a library runs unasked: with the three protocols of NCCL, and one of which nothing is known.
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
    """Every algorithm for the collective `kind` by name: (levels, payload per device) -> seconds.

    Raises:
        CostError: no such collective.
    """
    if kind in OTHERS:
        return OTHERS[kind]
    if kind not in KINDS:
        raise CostError(
            f"no price is known for the collective {kind!r}",
            why=f"the collectives are {', '.join(KINDS)}",
        )
    if kind == "all_gather":
        return GATHERS
    times = 2 if kind == "all_reduce" else 1
    forms = {name: _backwards(gather, times) for name, gather in GATHERS.items()}
    return {**forms, **ALL_REDUCES} if kind == "all_reduce" else forms


def _backwards(gather: Form, times: int) -> Form:
    """A reduce_scatter, which is an all_gather run backwards, or one and then the other."""
    return lambda levels, nbytes: times * gather(levels, nbytes / group_size(levels))


_FORMS = {kind: algorithms(kind) for kind in KINDS}


@lru_cache(maxsize=4096)
def _views(levels: tuple[Level, ...], trees: bool) -> tuple[tuple[float, tuple[Level, ...]], ...]:
    """For each protocol its seconds before the first byte and the levels as it finds them."""
    rows = zip(*((lv.library.tree if trees else lv.library.ring) for lv in levels), strict=True)
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
    """Seconds of the collective called `kind`; a group of one device is free.

    Args:
        kind: one of `KINDS`.
        levels: the levels of the network that it spans, outermost first.
        nbytes: the payload of each device before the call.
        algorithm: the name of one; None for the cheapest of those that the library runs by itself.

    Raises:
        CostError: no such collective, or no such algorithm for it.
    """
    forms = _FORMS.get(kind) or algorithms(kind)
    if algorithm is not None and algorithm not in forms:
        raise CostError(
            f"no price is known for {kind} by the algorithm {algorithm!r}",
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
        for base, view in _views(tuple(span), name in _TREES and known)
    )

"""Protocols: the ways in which a library moves data over a link, traded latency against bandwidth.

NCCL has three. LL sends four bytes of flag with every four of data, so that nobody waits for a
separate signal; LL128 eight of flag with 120 of data; Simple sends data alone and signals after
each chunk. The figures are those with which NCCL 2.2x predicts its own times to choose by size
(src/graph/tuning.cc: baseLat, hwLat and the shares of bandwidth in ncclTopoTuneModel, in
microseconds there); its caps for some processors and channels are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

US = 1e-6


class Protocol(NamedTuple):
    """How one protocol changes a level's figures.

    Attributes:
        name: as the library calls it.
        base: seconds of a call before its first byte.
        latency: what a message takes, as a share of the level's latency (that of Simple).
        bandwidth: the share of the level's bandwidth that is left to the payload.
    """

    name: str
    base: float
    latency: float
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Library:
    """The protocols of a library on one kind of link, for rings and for trees (none: no trees)."""

    ring: tuple[Protocol, ...]
    tree: tuple[Protocol, ...]


# A library of which nothing is known, and gloo: the figures of the link as they are.
PLAIN = Library((Protocol("plain", 0.0, 1.0, 1.0),), ())

_NAMES = ("LL", "LL128", "Simple")
_RING_BASE, _TREE_BASE = (6.6, 14.0, 8.4), (6.8, 14.0, 8.4)
_RING_SHARE = (1 / 2, 0.92, 1.0)
# Trees reach 0.92 of a ring's bandwidth; LL128 of that 7/9 within a node, 120/128 between nodes.
_TREE_SHARE = {True: (0.92 / 3.8, 0.92 * 7 / 9, 0.92), False: (0.92 / 3.8, 0.92 * 120 / 128, 0.92)}
# Microseconds a message, by kind of link: rings, trees.
_HOPS = {
    "NVLink": ((0.6, 1.9, 3.4), (0.6, 1.25, 4.0)),
    "PCIe": ((1.0, 2.5, 5.7), (1.0, 1.9, 4.0)),
    "network": ((2.7, 4.0, 14.0), (5.0, 8.5, 14.0)),
}
# The kinds of link that devices.toml may name; NCCL prices all networks alike.
KINDS = {
    "NVLink": "NVLink",
    "PCIe": "PCIe",
    "memory": "PCIe",
    "InfiniBand": "network",
    "RoCE": "network",
    "Ethernet": "network",
}
LIBRARIES = ("NCCL", "gloo", "unknown")
# Seconds of an all_reduce inside the switches (NVLS) besides its bytes: 25 us in that table, less
# the base that every call has here.
SWITCH_LATENCY = (25 - min(_RING_BASE)) * US


def _protocols(
    bases: tuple[float, ...], hops: tuple[float, ...], simple: float, shares: tuple[float, ...]
) -> tuple[Protocol, ...]:
    rows = zip(_NAMES, bases, hops, shares, strict=True)
    return tuple(Protocol(name, base * US, hop / simple, share) for name, base, hop, share in rows)


def _nccl(kind: str) -> Library:
    rings, trees = _HOPS[kind]
    return Library(
        _protocols(_RING_BASE, rings, rings[-1], _RING_SHARE),
        _protocols(_TREE_BASE, trees, rings[-1], _TREE_SHARE[kind != "network"]),
    )


_NCCL = {kind: _nccl(priced_as) for kind, priced_as in KINDS.items()}


def library(name: str, kind: str) -> Library:
    """The protocols of a library, one of LIBRARIES, on a link of one of KINDS."""
    return _NCCL[kind] if name == "NCCL" else PLAIN

"""Protocols of communication libraries, which trade latency against bandwidth.

NCCL has three. LL sends four bytes of flag with every four bytes of data, so that nobody waits for
a separate signal; LL128 sends eight bytes of flag with 120 of data; Simple sends data alone and
signals after each chunk. The figures are those by which NCCL 2.2x predicts its times (baseLat,
hwLat and the bandwidth factors of ncclTopoTuneModel in src/graph/tuning.cc, in microseconds); its
limits for particular processors and channel counts are left out. Inside a node whose collectives
were measured, tables/links.csv has figures instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from autopar.cost.kernel_tables import Links

US = 1e-6


class Protocol(NamedTuple):
    """Factors by which one protocol changes the figures of a level.

    Attributes:
        name: NCCL's name.
        base: seconds before the first byte of a call.
        latency: latency per message, relative to the level's latency (that of Simple).
        bandwidth: share of the level's bandwidth left for the payload.
    """

    name: str
    base: float
    latency: float
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Library:
    """A library's protocols on one kind of link.

    Attributes:
        ring: for rings.
        tree: for trees; empty without them.
        direct: for messages from each device to each other; empty if they are those of rings.
        own: shards that a device copies to itself, as a share of the time to send one.
        switch: seconds of an all_reduce in the switches, in addition to the time of its bytes and a
            ring's base.
    """

    ring: tuple[Protocol, ...]
    tree: tuple[Protocol, ...]
    direct: tuple[Protocol, ...] = ()
    own: float = 0.0
    switch: float = 0.0


# gloo and unknown libraries: the figures of the link, unchanged.
PLAIN = Library((Protocol("plain", 0.0, 1.0, 1.0),), ())

# Seconds of an all_reduce in the switches (NVLS) without the time of its bytes: 25 us in that
# table, minus the base that every call has here.
SWITCH_LATENCY = (25 - 6.6) * US
_NAMES = ("LL", "LL128", "Simple")
_RING_BASE, _TREE_BASE = (6.6, 14.0, 8.4), (6.8, 14.0, 8.4)
_RING_SHARE = (1 / 2, 0.92, 1.0)
# Trees reach 0.92 of a ring's bandwidth; LL128 of that 7/9 within a node, 120/128 between nodes.
_TREE_SHARE = {True: (0.92 / 3.8, 0.92 * 7 / 9, 0.92), False: (0.92 / 3.8, 0.92 * 120 / 128, 0.92)}
# Microseconds per message, by kind of link: rings, trees.
_HOPS = {
    "NVLink": ((0.6, 1.9, 3.4), (0.6, 1.25, 4.0)),
    "PCIe": ((1.0, 2.5, 5.7), (1.0, 1.9, 4.0)),
    "network": ((2.7, 4.0, 14.0), (5.0, 8.5, 14.0)),
}
# Kinds of link in devices.toml; NCCL prices all networks alike.
KINDS = {
    "NVLink": "NVLink",
    "Infinity Fabric": "NVLink",
    "PCIe": "PCIe",
    "memory": "PCIe",
    "InfiniBand": "network",
    "RoCE": "network",
    "Ethernet": "network",
}
LIBRARIES = ("NCCL", "gloo", "unknown")


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
        switch=SWITCH_LATENCY,
    )


_NCCL = {kind: _nccl(priced_as) for kind, priced_as in KINDS.items()}


def library(name: str, kind: str) -> Library:
    """Returns the protocols of a library (one of LIBRARIES) on a link (one of KINDS)."""
    return _NCCL[kind] if name == "NCCL" else PLAIN


@cache
def measured(links: Links, latency: float) -> Library:
    """Returns NCCL's protocols inside a node as they were measured.

    A tree inside a node is a chain, whose latencies are a ring's and whose bandwidth is 0.92 of it.

    Args:
        links: the device's row of tables/links.csv.
        latency: seconds per message to which those of the protocols are relative.
    """
    bases = (links.ll_base, links.ll128_base, links.simple_base)
    hops = (links.ll_hop, links.ll128_hop, links.simple_hop)
    shares = (links.ll_share, links.ll128_share, 1.0)
    direct = zip(
        (links.first_base, links.second_base, links.third_base),
        (links.first_share, links.second_share, links.third_share),
        strict=True,
    )
    hop = links.direct_hop / latency
    rows = tuple(zip(_NAMES, bases, hops, shares, strict=True))
    return Library(
        tuple(Protocol(name, base, hop / latency, share) for name, base, hop, share in rows),
        tuple(Protocol(name, base, hop / latency, 0.92 * share) for name, base, hop, share in rows),
        tuple(Protocol("direct", base, hop, share) for base, share in direct),
        links.own,
        links.switch_base - min(bases),
    )

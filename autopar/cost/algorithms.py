"""Closed-form times of collective algorithms over the levels of a network.

A message of m bytes takes a + m / b, with latency a and bandwidth b: the model of Thakur,
Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH" (IJHPCA 19(1),
2005), without the time of the additions. n is the number of devices. Levels are listed outermost
first: `[Level(16, ...), Level(8, ...)]` is sixteen nodes of eight devices.

`GATHERS` maps each all_gather algorithm to a function (levels, shard) -> seconds, where `shard` is
the number of bytes that each device contributes; a reduce_scatter is the same run backwards.
`ALL_REDUCES` holds the all_reduce algorithms that are not a reduce_scatter followed by an
all_gather. On a single level a hierarchical algorithm reduces to its part for that level.
`collective_seconds.py` says which of them a library runs by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.cost.protocol import PLAIN, Library

INTRA, INTER = "intra", "inter"


class Level(NamedTuple):
    """One level of the network, as seen by a group of devices.

    Attributes:
        size: number of parts of the next level (devices, on the innermost) that it joins.
        bandwidth: bytes/s per device in one direction while all devices communicate.
        latency: seconds per message.
        alone: bytes/s of one device while the others of its node are silent (a whole network card);
            0 if that is no more than `bandwidth`.
        switch: payload bytes/s at which the switches themselves all_reduce; 0 if they cannot.
        resource: name of the links, INTRA or INTER a node; levels with the same name share them.
        library: the protocols of the communication library on these links.
    """

    size: int
    bandwidth: float
    latency: float
    alone: float = 0.0
    switch: float = 0.0
    resource: str = ""
    library: Library = PLAIN


Levels = Sequence[Level]


def group_size(levels: Levels) -> int:
    """Returns the number of devices in the group."""
    return math.prod(level.size for level in levels)


def ring_bandwidth(levels: Levels) -> float:
    """Returns the bytes/s around a ring through all devices; the slowest level decides.

    There are as many rings as devices in a node, and each leaves the node at a different device. A
    level therefore carries the bandwidth of all devices in one of its parts. Infinite for a single
    device.
    """
    slowest, inside = math.inf, 1
    for level in reversed(levels):
        if level.size > 1:
            slowest = min(slowest, inside * level.bandwidth)
        inside *= level.size
    return slowest


def ring(levels: Levels, shard: float) -> float:
    """Returns the seconds of a ring, (n-1) (a + shard / b), paced by the slowest link.

    See "Allgather" and "Reduce-Scatter" in Thakur et al. Twice this time is an all_reduce that
    sends the fewest possible bytes, 2 (n-1)/n of the tensor: Patarasuk & Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations" (JPDC 69(2), 2009).
    """
    latency = max((level.latency for level in levels if level.size > 1), default=0.0)
    return (group_size(levels) - 1) * (latency + shard / ring_bandwidth(levels))


def channels(levels: Levels, shard: float, *, copied: bool = True) -> float:
    """Returns the seconds of NCCL's ring, where pipelined chunks pay each link's latency once.

    With g nodes, g - 1 of the n - 1 links lead out of a node and the others stay inside: the
    latencies of ncclTopoTuneModel in NCCL's src/graph/tuning.cc. On one level it equals `ring`, but
    for the copy of a device's own shard, if it is `copied`, where the library was measured.
    """
    seconds, parts = 0.0, 1
    for level in levels:
        seconds += parts * (level.size - 1) * level.latency
        parts *= level.size
    own = levels[-1].library.own if copied and parts > 1 else 0.0
    return seconds + (parts - 1 + own) * shard / ring_bandwidth(levels)


def torus(levels: Levels, shard: float) -> float:
    """Returns the seconds of a 2D torus: rings on each level, outermost first (small shards).

    Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash"
    (arXiv:1811.05233): its all_reduce is a reduce_scatter inside the node, an all_reduce by all
    devices between nodes, and an all_gather inside the node.
    """
    seconds = 0.0
    for level in levels:
        seconds += ring((level,), shard)
        shard *= level.size
    return seconds


def _leaders(levels: Levels) -> Levels:
    """Returns the outer levels for one device per node, which has a network card to itself."""
    return [level._replace(bandwidth=level.alone or level.bandwidth) for level in levels]


def h_ring(levels: Levels, shard: float) -> float:
    """Returns the seconds of a hierarchical ring: gather in a node, ring of nodes, broadcast.

    One device of each node takes part in the ring between nodes. Jia et al., "Highly Scalable Deep
    Learning Training System with Mixed-Precision" (arXiv:1807.11205, sec. 3.3); the H-Ring of PaRO
    (arXiv:2310.06003), there with reductions.
    """
    *outer, inner = levels
    gathered = ring((inner,), shard)
    if not outer or group_size(outer) == 1:
        return gathered
    between = ring(_leaders(outer), shard * inner.size)
    return gathered + between + chain((inner,), shard * group_size(levels))


def ho_ring(levels: Levels, shard: float) -> float:
    """Returns the seconds of overlapping rings: those inside and between nodes run at once.

    PaRO (arXiv:2310.06003, HO-Ring): every device sends its shard around the nodes while the ring
    inside the node passes on the shards that have arrived; then the inner ring finishes. With g
    nodes of m devices, p seconds per message inside and q between, the k-th shard arrives at k q,
    and the remaining (g - k) (m - 1) messages take p each; either the first or the last shard
    decides.
    """
    *outer, inner = levels
    inside, nodes = ring((inner,), shard), group_size(outer)
    return max(nodes * inside, ring(outer, shard) + inside)


def h_ring_all_reduce(levels: Levels, nbytes: float) -> float:
    """Returns the seconds of PaRO's H-Ring: reduce in the node, all_reduce between, broadcast."""
    *outer, inner = levels
    nodes = group_size(outer)
    if nodes == 1:
        return 2 * ring((inner,), nbytes / inner.size)
    return 2 * chain((inner,), nbytes) + 2 * ring(_leaders(outer), nbytes / nodes)


def tree(levels: Levels, nbytes: float) -> float:
    """Returns the seconds of a double binary tree: each handles a half, 2 nbytes / b.

    Sanders, Speck & Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
    (Parallel Computing 35(12), 2009). As in NCCL since 2.4, trees join nodes, and the devices of a
    node form a chain; latency is twice the depth (src/graph/tuning.cc, ncclTopoTuneModel).
    """
    depth = sum(
        level.latency * (level.size - 1 if level.resource == INTRA else level.size.bit_length() - 1)
        for level in levels
    )
    return 2 * depth + 2 * nbytes / ring_bandwidth(levels)


def switch(levels: Levels, nbytes: float) -> float:
    """Returns the seconds of a reduction in the switches (NVLink SHARP): one send, one receive.

    Infinite if the switches cannot reduce or the group spans several levels.
    """
    busy = [level for level in levels if level.size > 1]
    if len(busy) != 1 or not busy[0].switch:
        return math.inf
    return busy[0].library.switch + nbytes / busy[0].switch


def pairwise(levels: Levels, nbytes: float) -> float:
    """Returns the seconds of an all_to_all by pairwise exchange, (n-1) a + (n-1)/n nbytes / b.

    Thakur et al., "Alltoall", long messages. Data that leaves a part crosses the bisection of its
    level at each device's bandwidth on that level; links of different kinds work at the same time.
    """
    n, inside, waits = group_size(levels), 1, 0.0
    busy: dict[str, float] = {}
    for level in reversed(levels):
        peers = (level.size - 1) * inside
        inside *= level.size
        waits += peers * level.latency
        sent = peers / n * nbytes / level.bandwidth
        busy[level.resource] = busy.get(level.resource, 0.0) + sent
    own = levels[-1].library.own * nbytes / n / levels[-1].bandwidth if n > 1 else 0.0
    return waits + own + max(busy.values(), default=0.0)


def scatter_gather(levels: Levels, nbytes: float) -> float:
    """Returns the seconds of a broadcast by scatter and ring all_gather.

    (ceil(log2 n) + n-1) a + 2 (n-1)/n nbytes / b: Thakur et al., "Broadcast", long messages (van de
    Geijn).
    """
    n, latency = group_size(levels), max((level.latency for level in levels), default=0.0)
    rounds = math.ceil(math.log2(n)) + n - 1
    return rounds * latency + 2 * (n - 1) / n * nbytes / ring_bandwidth(levels)


def chain(levels: Levels, nbytes: float) -> float:
    """Returns the seconds of a chained broadcast or reduce: all latencies, plus nbytes / b.

    NCCL's ring broadcast in small chunks (src/graph/tuning.cc).
    """
    if group_size(levels) == 1:
        return 0.0
    return channels(levels, 0.0) + nbytes / ring_bandwidth(levels)


def message(levels: Levels, nbytes: float) -> float:
    """Returns the seconds of one message, a + nbytes / b, over the slowest of the levels."""
    return max(
        (level.latency + nbytes / level.bandwidth for level in levels if level.size > 1),
        default=0.0,
    )


Form = Callable[[Levels, float], float]
GATHERS: dict[str, Form] = {
    form.__name__: form for form in (ring, channels, torus, h_ring, ho_ring)
}
ALL_REDUCES: dict[str, Form] = {"tree": tree, "switch": switch, "h_ring": h_ring_all_reduce}
OTHERS: dict[str, dict[str, Form]] = {
    "all_to_all": {"pairwise": pairwise},
    "broadcast": {"chain": chain, "scatter_gather": scatter_gather},
    "send": {"message": message},
}

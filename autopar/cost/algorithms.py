"""How collectives run: the seconds of each algorithm, in closed form over the network's levels.

With n devices, latency a and bandwidth b, a message of m bytes takes a + m / b, the model of
Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 19(1), 2005), without the time of the additions. Levels are given outermost first:
`[Level(16, ...), Level(8, ...)]` are sixteen nodes of eight devices.

`GATHERS` holds one function (levels, shard) -> seconds a way to all_gather, where `shard` is what
each device brings; a reduce_scatter is the same run backwards, and `ALL_REDUCES` holds what is not
simply one after the other. On a single level the hierarchical algorithms are their part of it.
Which of them a library would run by itself is told in collective.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.cost.protocol import PLAIN, SWITCH_LATENCY, Library

INTRA, INTER = "intra", "inter"


class Level(NamedTuple):
    """One level of the network as a group of devices sees it.

    Attributes:
        size: how many parts of the next level (devices, on the innermost) it joins.
        bandwidth: bytes/s in one direction that each device gets while all of them talk.
        latency: seconds a message.
        alone: bytes/s of one device while its neighbours inside are silent, a whole network card;
            0 if that is no more than `bandwidth`.
        switch: bytes/s of payload at which the switches themselves all_reduce; 0 if they cannot.
        resource: the links behind it, INTRA or INTER a node; levels of one name share them.
        library: the ways in which data is moved on it.
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
    """Number of devices in the group."""
    return math.prod(level.size for level in levels)


def ring_bandwidth(levels: Levels) -> float:
    """Bytes/s around a ring through all devices; the slowest level decides.

    There are as many rings as ways out of a node, each leaving it at another device, so that a
    level carries as much as it gives to all devices inside one part. Infinite for a lone device.
    """
    slowest, inside = math.inf, 1
    for level in reversed(levels):
        if level.size > 1:
            slowest = min(slowest, inside * level.bandwidth)
        inside *= level.size
    return slowest


def ring(levels: Levels, shard: float) -> float:
    """Ring, (n-1) (a + shard / b): rounds in step, each as slow as the slowest link.

    Thakur et al., "Allgather" and "Reduce-Scatter". Twice that, an all_reduce, sends the least
    possible bytes, 2 (n-1)/n of the tensor: Patarasuk & Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations" (JPDC 69(2), 2009).
    """
    latency = max((level.latency for level in levels if level.size > 1), default=0.0)
    return (group_size(levels) - 1) * (latency + shard / ring_bandwidth(levels))


def channels(levels: Levels, shard: float) -> float:
    """NCCL's ring: chunks follow one another, so each waits once for every link on its way.

    Of the n - 1 links as many as there are nodes but one lead out of a node, the others stay in it:
    the latencies of NCCL's src/graph/tuning.cc, ncclTopoTuneModel. One level: the same as `ring`.
    """
    seconds, parts = 0.0, 1
    for level in levels:
        seconds += parts * (level.size - 1) * level.latency
        parts *= level.size
    return seconds + (parts - 1) * shard / ring_bandwidth(levels)


def torus(levels: Levels, shard: float) -> float:
    """2D torus: a ring on each level, the outermost first, as the shards are still small there.

    Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash"
    (arXiv:1811.05233), whose all_reduce is a reduce_scatter inside, an all_reduce by all devices
    between, and an all_gather inside.
    """
    seconds = 0.0
    for level in levels:
        seconds += ring((level,), shard)
        shard *= level.size
    return seconds


def _leaders(levels: Levels) -> Levels:
    """The outer levels for one device a node, which has a network card to itself."""
    return [level._replace(bandwidth=level.alone or level.bandwidth) for level in levels]


def h_ring(levels: Levels, shard: float) -> float:
    """Hierarchical ring: gather in the node, a ring of one device a node, broadcast in the node.

    Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision" (arXiv:
    1807.11205, sec. 3.3); the H-Ring of PaRO (arXiv:2310.06003), there with reductions.
    """
    *outer, inner = levels
    gathered = ring((inner,), shard)
    if not outer or group_size(outer) == 1:
        return gathered
    between = ring(_leaders(outer), shard * inner.size)
    return gathered + between + chain((inner,), shard * group_size(levels))


def ho_ring(levels: Levels, shard: float) -> float:
    """Hierarchical overlapping ring: the rings inside and between the nodes run at once.

    PaRO (arXiv:2310.06003, HO-Ring): every device sends its shard around the nodes while the ring
    in the node passes on what has arrived, and then finishes. With g nodes of m devices, p seconds
    a message inside and q between, the k-th shard arrives at k q and the (g - k) (m - 1) messages
    from then on take p each; the first or the last shard decides.
    """
    *outer, inner = levels
    inside, nodes = ring((inner,), shard), group_size(outer)
    return max(nodes * inside, ring(outer, shard) + inside)


def h_ring_all_reduce(levels: Levels, nbytes: float) -> float:
    """H-Ring: reduce in the node, all_reduce by one device a node, broadcast in the node (PaRO)."""
    *outer, inner = levels
    nodes = group_size(outer)
    if nodes == 1:
        return 2 * ring((inner,), nbytes / inner.size)
    return 2 * chain((inner,), nbytes) + 2 * ring(_leaders(outer), nbytes / nodes)


def tree(levels: Levels, nbytes: float) -> float:
    """Double binary tree: each of two trees reduces and broadcasts a half, 2 nbytes / b.

    Sanders, Speck & Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
    (Parallel Computing 35(12), 2009). As in NCCL since 2.4, the trees join nodes and the devices of
    a node are a chain; twice the depth in latencies (src/graph/tuning.cc, ncclTopoTuneModel).
    """
    depth = sum(
        level.latency * (level.size - 1 if level.resource == INTRA else level.size.bit_length() - 1)
        for level in levels
    )
    return 2 * depth + 2 * nbytes / ring_bandwidth(levels)


def switch(levels: Levels, nbytes: float) -> float:
    """Reduction inside the switches (NVLink SHARP): each device sends and receives once.

    Infinite where the switches cannot, or where the group spans levels.
    """
    busy = [level for level in levels if level.size > 1]
    if len(busy) != 1 or not busy[0].switch:
        return math.inf
    return SWITCH_LATENCY + nbytes / busy[0].switch


def pairwise(levels: Levels, nbytes: float) -> float:
    """all_to_all by pairwise exchange, (n-1) a + (n-1)/n nbytes / b.

    Thakur et al., "Alltoall", long messages. What leaves a part crosses the bisection of its level,
    at each device's own bandwidth there; links of different kinds are busy at the same time.
    """
    n, inside, waits = group_size(levels), 1, 0.0
    busy: dict[str, float] = {}
    for level in reversed(levels):
        peers = (level.size - 1) * inside
        inside *= level.size
        waits += peers * level.latency
        sent = peers / n * nbytes / level.bandwidth
        busy[level.resource] = busy.get(level.resource, 0.0) + sent
    return waits + max(busy.values(), default=0.0)


def scatter_gather(levels: Levels, nbytes: float) -> float:
    """Broadcast, (ceil(log2 n) + n-1) a + 2 (n-1)/n nbytes / b: a scatter and a ring all_gather.

    Thakur et al., "Broadcast", long messages (van de Geijn).
    """
    n, latency = group_size(levels), max((level.latency for level in levels), default=0.0)
    rounds = math.ceil(math.log2(n)) + n - 1
    return rounds * latency + 2 * (n - 1) / n * nbytes / ring_bandwidth(levels)


def chain(levels: Levels, nbytes: float) -> float:
    """Broadcast or reduce along a chain in small chunks: each link's latency once, nbytes / b.

    NCCL's ring broadcast (src/graph/tuning.cc).
    """
    if group_size(levels) == 1:
        return 0.0
    return channels(levels, 0.0) + nbytes / ring_bandwidth(levels)


def message(levels: Levels, nbytes: float) -> float:
    """One message, a + nbytes / b; over several levels that of the slowest one."""
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

"""One ring through all ranks, or one per rank of a node, each leaving the node at another rank.

Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 19(1), 2005), "Allgather"; Patarasuk & Yuan (JPDC 69(2), 2009) for the all_reduce.
"""

from __future__ import annotations

from autopar.cost.collectives._rounds import Rounds, Shape, Written, nodes


def all_gather(shape: Shape) -> Written:
    """Forwards the last received chunk in each of n - 1 rounds."""
    outer, inner = nodes(shape)
    rings = inner if outer > 1 else 1
    rounds = Rounds()
    for ring in range(rings):
        order = [node * inner + (ring + k) % inner for node in range(outer) for k in range(inner)]
        rounds.ring(0, order, [[rank * rings + ring] for rank in order])
    return outer * inner * rings, rounds.written

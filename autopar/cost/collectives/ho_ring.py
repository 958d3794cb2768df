"""Hierarchical overlapping ring: overlaps rings between the nodes with rings inside them.

PaRO (arXiv:2310.06003): every rank sends its part around the nodes, among ranks of the same number,
while the ring in its node forwards the parts that have arrived.
"""

from __future__ import annotations

from autopar.cost.collectives._rounds import Rounds, Shape, Written, nodes


def all_gather(shape: Shape) -> Written:
    """Sends the k-th part from another node around the node while the next one is in transit."""
    outer, inner = nodes(shape)
    rounds, stride = Rounds(), max(inner - 1, 1)
    ranks = [[node * inner + place for place in range(inner)] for node in range(outer)]
    for arrival in range(outer):
        for node in range(outer):
            held = [[rank] for rank in ranks[node - arrival]]
            rounds.ring(arrival * stride, ranks[node], held)
            if arrival < outer - 1:
                for place, rank in enumerate(ranks[node]):
                    after = ranks[(node + 1) % outer][place]
                    rounds.send(arrival * stride, rank, after, held[place])
    return outer * inner, rounds.written

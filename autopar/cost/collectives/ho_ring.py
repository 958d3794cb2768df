"""Hierarchical overlapping ring: rings inside and between the nodes at once, then those inside.

PaRO (arXiv:2310.06003): every rank sends its part around the nodes, among those of its number,
while the ring in its node passes on what has arrived.
"""

from __future__ import annotations

from autopar.cost.collectives._rounds import Rounds, Shape, Written, nodes


def all_gather(shape: Shape) -> Written:
    """The k-th arrival from another node goes around the node while the next one is on its way."""
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

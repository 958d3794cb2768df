"""Hierarchical ring: one leader of each node takes part in a ring between the nodes.

Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision" (arXiv:1807.11205,
section 3.3): reduce inside a node, all_reduce between leaders, broadcast inside; the H-Ring of PaRO
(arXiv:2310.06003).
"""

from __future__ import annotations

from autopar.cost.collectives._rounds import Rounds, Shape, Written, backwards, nodes, ring


def all_gather(shape: Shape) -> Written:
    """Gathers along a chain to the leader, around the leaders, and down the chain in a pipeline."""
    outer, inner = nodes(shape)
    rounds = Rounds()
    leaders = [node * inner for node in range(outer)]
    held = [list(range(leader, leader + inner)) for leader in leaders]
    for leader in leaders:
        for step in range(inner - 1):
            for rank in range(leader, leader + inner - 1 - step):
                rounds.send(step, rank + 1, rank, [rank + 1 + step])
    start = inner - 1
    rounds.ring(start, leaders, held)
    for node, leader in enumerate(leaders):
        for step in range(inner - 1):
            # A rank already has the chunks that it forwarded to the leader.
            rank = leader + step
            rounds.send(start + step, rank, rank + 1, range(leader, rank + 1))
            for arrival in range(1, outer):
                rounds.send(start + arrival + step, rank, rank + 1, held[node - arrival])
    return outer * inner, rounds.written


def all_reduce(shape: Shape) -> Written:
    """Reduces up the chain of every node and around the leaders, and broadcasts down the chain."""
    outer, inner = nodes(shape)
    rounds = Rounds()
    leaders = [node * inner for node in range(outer)]
    around = ring(leaders, [[node] for node in range(outer)])
    for leader in leaders:
        for step in range(inner - 1):
            rank = leader + inner - 1 - step
            rounds.send(step, rank, rank - 1, range(outer), True)
    start = rounds.add(inner - 1, backwards(around))
    rounds.add(start, around)
    for node, leader in enumerate(leaders):
        for step in range(inner - 1):
            for arrival in range(outer):
                chunk = (node - arrival) % outer
                rounds.send(start + arrival + step, leader + step, leader + step + 1, [chunk])
    return outer, rounds.written

"""Pairwise exchange between all ranks.

Thakur, Rabenseifner & Gropp (IJHPCA 19(1), 2005), "Alltoall", long messages.
"""

from __future__ import annotations

import math

from autopar.cost.collectives._rounds import Rounds, Shape, Written


def all_to_all(shape: Shape) -> Written:
    """Sends from each rank to the rank at distance k + 1 in round k."""
    count, rounds = math.prod(shape), Rounds()
    for step in range(1, count):
        for rank in range(count):
            target = (rank + step) % count
            rounds.send(step - 1, rank, target, [rank * count + target])
    return count**2, rounds.written

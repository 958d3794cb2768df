"""Recursive halving and doubling: every round exchanges half of the remaining data.

Thakur, Rabenseifner & Gropp (IJHPCA 19(1), 2005), "Reduce-Scatter" and "Allreduce". If the number
of ranks is odd, one half has an additional rank, which gives its part to a rank with a partner.
"""

from __future__ import annotations

import math

from autopar.cost.collectives._rounds import Rounds, Shape, Written


def all_gather(shape: Shape) -> Written:
    """Doubles the data in every round, between neighbours first to limit traffic between nodes."""
    count = math.prod(shape)
    rounds = Rounds()
    _gather(rounds, range(count), (count - 1).bit_length() - 1)
    return count, rounds.written


def _gather(rounds: Rounds, ranks: range, last: int) -> None:
    """Gathers within each half, and then between the halves in round `last`."""
    if len(ranks) == 1:
        return
    middle = (len(ranks) + 1) // 2
    halves = ranks[:middle], ranks[middle:]
    for here, there in (halves, halves[::-1]):
        _gather(rounds, here, last - 1)
        for place, rank in enumerate(here):
            rounds.send(last, there[place % len(there)], rank, there)

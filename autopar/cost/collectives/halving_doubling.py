"""Recursive halving and doubling: half of what is left is exchanged in every round.

Thakur, Rabenseifner & Gropp (IJHPCA 19(1), 2005), "Reduce-Scatter" and "Allreduce". Where a number
is no power of two one half has a rank more, which gives its part to one that has a partner.
"""

from __future__ import annotations

import math

from autopar.cost.collectives._rounds import Rounds, Shape, Written


def all_gather(shape: Shape) -> Written:
    """Twice as much in every round; neighbours first, so that little leaves a node alone."""
    count = math.prod(shape)
    rounds = Rounds()
    _gather(rounds, range(count), (count - 1).bit_length() - 1)
    return count, rounds.written


def _gather(rounds: Rounds, ranks: range, last: int) -> None:
    """Gathers in each half, and then from the other one in round `last`."""
    if len(ranks) == 1:
        return
    middle = (len(ranks) + 1) // 2
    halves = ranks[:middle], ranks[middle:]
    for here, there in (halves, halves[::-1]):
        _gather(rounds, here, last - 1)
        for place, rank in enumerate(here):
            rounds.send(last, there[place % len(there)], rank, there)

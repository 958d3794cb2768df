"""Broadcast along a binomial tree: in every round each rank that has the data sends it to another.

Thakur, Rabenseifner & Gropp (IJHPCA 19(1), 2005), "Broadcast", short messages; here level by level,
to minimise traffic between nodes.
"""

from __future__ import annotations

from autopar.cost.collectives._rounds import Rounds, Shape, Written, groups


def broadcast(shape: Shape) -> Written:
    """Broadcasts along the outermost level first."""
    rounds, number, reached = Rounds(), 0, {0}
    for level, size in enumerate(shape):
        steps = (size - 1).bit_length()
        for ranks in groups(shape, level):
            if ranks[0] not in reached:
                continue
            for step in range(steps):
                for place in range(min(1 << step, size - (1 << step))):
                    rounds.send(number + step, ranks[place], ranks[place + (1 << step)], [0])
            reached.update(ranks)
        number += steps
    return 1, rounds.written

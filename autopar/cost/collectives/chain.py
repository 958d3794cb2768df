"""Broadcast along a chain of all ranks, in pipelined pieces.

NCCL's ring broadcast (src/graph/tuning.cc).
"""

from __future__ import annotations

import math

from autopar.cost.collectives._rounds import Rounds, Shape, Written


def broadcast(shape: Shape) -> Written:
    """Sends from each rank to the next."""
    rounds = Rounds()
    for rank in range(math.prod(shape) - 1):
        rounds.send(rank, rank, rank + 1, [0])
    return 1, rounds.written

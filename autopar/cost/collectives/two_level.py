"""Two-level all_to_all: inside nodes first, to merge the messages to each rank of another node.

Hierarchical exchange as in "DeepSpeed-MoE" (arXiv:2201.05596, section 5.3) and Tutel.
"""

from __future__ import annotations

import math

from autopar.cost.collectives._rounds import Rounds, Shape, Written, groups


def all_to_all(shape: Shape) -> Written:
    """Exchanges level by level from the innermost, by the receiver's number on that level."""
    count, rounds, number = math.prod(shape), Rounds(), 0
    held = [[rank * count + target for target in range(count)] for rank in range(count)]
    for level in reversed(range(len(shape))):
        stride, size = math.prod(shape[level + 1 :]), shape[level]
        after: list[list[int]] = [[] for _ in range(count)]
        for peers in groups(shape, level):
            for place, rank in enumerate(peers):
                sorted_out: list[list[int]] = [[] for _ in peers]
                for chunk in held[rank]:
                    sorted_out[chunk % count // stride % size].append(chunk)
                for there, chunks in enumerate(sorted_out):
                    after[peers[there]] += chunks
                    if there != place:
                        rounds.send(number + (there - place) % size - 1, rank, peers[there], chunks)
        held, number = after, number + size - 1
    return count**2, rounds.written

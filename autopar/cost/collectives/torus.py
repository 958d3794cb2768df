"""2D torus: rings on every level, each over all ranks that differ only on that level.

Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash"
(arXiv:1811.05233): a reduce_scatter inside, an all_reduce between all peers, an all_gather inside.
"""

from __future__ import annotations

from autopar.cost.collectives._rounds import Rounds, Shape, Written, groups

NAME = "2d_torus"


def all_gather(shape: Shape) -> Written:
    """Gathers along the outermost level first, while there is little data."""
    rounds, number = Rounds(), 0
    ranks = groups((1, len(groups(shape, len(shape) - 1)) * shape[-1]), 1)[0]
    held = [[rank] for rank in ranks]
    for level in range(len(shape)):
        rings = groups(shape, level)
        for order in rings:
            rounds.ring(number, order, [held[rank] for rank in order])
        number += shape[level] - 1
        for order in rings:
            everything = [chunk for rank in order for chunk in held[rank]]
            for rank in order:
                held[rank] = everything
    return len(ranks), rounds.written

"""A model as a sequence of layers, with a short graph that repeats equal layers a few times."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from autopar.inter_op.layers import Layers
from autopar.ir.graph import Graph
from autopar.ir.stage_graphs import cut
from autopar.lower.parameter_keys import leaf_key
from autopar.passes.observations import NOTHING, Observations

BLOCKS = 2  # layers of a run of equal ones that are planned
Signature = tuple[tuple[Hashable, int], ...]  # (kind of layer, length of its run)


@dataclass(frozen=True)
class Layered:
    """A model on one microbatch, whose graph contains each run of equal layers a few times.

    Attributes:
        graph: normalised, without shares and repeats.
        layers: layers of the graph.
        more: number of equal layers that each run of the whole model has in addition.
        samples: number of samples of the microbatch, 0 if unknown.
        observed: what autograd saves in the model.
    """

    graph: Graph
    layers: Layers
    more: int = 0
    samples: int = 0
    observed: Observations = NOTHING

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of all layers of the whole model."""
        return tuple(
            kind
            for kind, count in runs(self.layers.kinds)
            for _ in range(count + self.more * (count > 1))
        )

    @property
    def ties(self) -> bool:
        """Returns whether layers share trained parameters."""
        number, ends, layer = 0, set(self.layers.ends), dict[str, int]()
        for node in self.graph.nodes:
            layer[node.name] = number
            number += node.name in ends
        readers: dict[str, set[int]] = {}
        for leaf in self.graph.leaves("param"):
            if leaf.requires_grad:
                users = {layer[user] for user in self.graph.users[leaf.name]}
                readers.setdefault(leaf_key(leaf), set()).update(users)
        return any(len(layers) > 1 for layers in readers.values())

    def part(self, signature: Signature) -> Graph:
        """Returns the graph of a range of layers; of a long run it contains only a few layers.

        Args:
            signature: kinds of the layers with the lengths of their runs.

        Raises:
            StageError: the layers compute nothing that is needed later.
        """
        have, names = runs(self.layers.kinds), [kind for kind, _ in signature]
        at = next(
            at
            for at in range(len(have))
            if [kind for kind, _ in have[at : at + len(names)]] == names
        )
        starts = np.cumsum([0, *(count for _, count in have)]).tolist()
        last = at + len(names) - 1
        start, stop = starts[at], starts[last] + min(signature[-1][1], have[last][1], BLOCKS)
        if len(names) > 1:  # take the last layers of the first run, next to the second run
            start = starts[at + 1] - min(signature[0][1], have[at][1], BLOCKS)
        cuts = [place for place in (start, stop) if 0 < place < len(self.layers)]
        return cut(self.graph, [self.layers.ends[place - 1] for place in cuts])[1 if start else 0]


def runs(kinds: Sequence[Hashable]) -> Signature:
    """Groups neighbouring equal kinds: [a, a, b] -> ((a, 2), (b, 1))."""
    return tuple((kind, len(list(same))) for kind, same in groupby(kinds))


def unlike(recompute: str, kinds: Sequence[Hashable], signature: Signature, part: Graph) -> bool:
    """Returns whether a stage cannot recompute in the way that the user requests.

    A program recomputes runs of equal blocks. A stage with a single block has no such run, so it
    would save time that longer stages cannot save.

    Args:
        recompute: as the user asked, "auto" or "none" for nothing in particular.
        kinds: kinds of all layers of the model.
        signature: kinds and numbers of the stage's layers.
        part: the stage's graph.
    """
    if recompute in ("auto", "none") or part.repeats:
        return False
    return any(kinds.count(kind) > 1 for kind, _ in signature)

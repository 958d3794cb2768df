"""Adds up the counts of all microbatches before a step, for losses that divide by them.

`passes/loss/whole_counts.py` replaces a count of a microbatch by an input, whose graph is in the
program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.operators.interpret import run
from autopar.runtime.generated import Generated
from autopar.runtime.ranks.shared import Peers


@dataclass(frozen=True)
class WholeCounts:
    """Inputs that are sums over the whole batch.

    Attributes:
        graphs: input -> the graph of one microbatch's part, on the microbatch of all ranks.
    """

    graphs: Mapping[str, Graph]

    @classmethod
    def of(cls, modules: Sequence[Generated]) -> WholeCounts:
        """Reads the counts of the programs of all stages; raises GraphError if one is damaged."""
        return cls(
            {
                name: parse_graph("\n".join(lines))
                for module in modules
                for name, lines in module.counts.items()
            }
        )

    @torch.no_grad()
    def __call__(
        self, parts: Sequence[Mapping[str, Tensor]], local: bool, peers: Peers
    ) -> dict[str, Tensor]:
        """Returns the counts of the whole batch, scalars by name.

        Args:
            parts: this rank's inputs of each microbatch.
            local: whether ranks pass different parts of a batch; each repeats its part to the size
                of the whole, counts as often, and the mean over ranks is the count.
            peers: the ranks of the program.
        """
        counts = {}
        for name, graph in self.graphs.items():
            sums = [next(iter(run(graph, _grown(graph, part)).values())) for part in parts]
            total = torch.stack([value.double() for value in sums]).sum()
            if local and peers.everyone is not None:
                peers.everyone.all_reduce(total)
                total = total / peers.world
            counts[name] = total.to(sums[0].dtype).reshape(sums[0].shape)
        return counts


def _grown(graph: Graph, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the inputs of a graph, with this rank's rows repeated to the rows of all ranks."""
    given = {}
    for leaf in graph.leaves("input"):
        value, rows = part[leaf.target], leaf.type.shape[:1]
        if rows and value.shape[:1] != rows:
            value = value.repeat(rows[0] // len(value), *[1] * (value.dim() - 1))
        given[leaf.target] = value
    return given

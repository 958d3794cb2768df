"""Distinguishes values of each sample from values into which the samples of a batch are mixed.

The mean of each class, or the correlation of two features, has no dimension of samples left. What
is computed from it is no sum over samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import Graph
from autopar.passes.loss.batch_factors import BatchFactors


@dataclass(frozen=True)
class MixedSamples:
    """The values of one graph into which samples are mixed.

    Attributes:
        graph: graph of one microbatch.
        factors: compares it with a larger batch.
        without: returns the values whose dimensions are none of the samples, as far as rules tell.
    """

    graph: Graph
    factors: BatchFactors
    without: Callable[[Graph], frozenset[str]]

    @cached_property
    def _suspects(self) -> frozenset[str]:
        return self.without(self.graph)

    @cached_property
    def _batched(self) -> frozenset[str]:
        """The values that depend on a tensor of the batch."""
        found = set[str]()
        for node in self.graph.nodes:
            cut = node.op == "input" and node.type.shape != ()
            if cut or any(name in found for name in node.inputs):
                found.add(node.name)
        return frozenset(found)

    def __contains__(self, name: str) -> bool:
        """Returns whether a value depends on the batch and has no dimension of samples."""
        if name not in self._batched or name not in self._suspects:
            return False
        # An operator without a rule loses track of dimensions, but not of their sizes.
        return self.graph[name].type.shape == () or not self.factors.grows(name)

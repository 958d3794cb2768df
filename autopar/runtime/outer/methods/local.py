"""LocalSGD and Local-AdamW (Stich, arXiv:1805.09767): replicas average their parameters.

The states of the inner optimizers are not averaged.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.runtime.outer.method import LearningRates, PromptMethod


class Local(PromptMethod):
    """Sets x = mean(x) at the end of a round."""

    NAME = "local"
    CHANGES = "replicas take tau independent steps, and then their average"

    def update(
        self, x: Tensor, average: Tensor, states: Mapping[str, Tensor], now: LearningRates
    ) -> None:
        """Sets x to the average."""
        x.copy_(average)

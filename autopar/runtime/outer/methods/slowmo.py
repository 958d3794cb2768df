"""SlowMo (Wang et al., arXiv:1910.00643, algorithm 1): slow momentum over averages.

    u = beta u + (anchor - mean(x)) / gamma,    anchor = x = anchor - rate gamma u

gamma is the learning rate of the inner optimizer's first group. With beta 0 and rate 1 this is
LocalSGD. A gamma of 0 is replaced by 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.runtime.outer.method import LearningRates, Option, PromptMethod


class SlowMo(PromptMethod):
    """Applies slow momentum to the average of each round."""

    NAME = "slowmo"
    OPTIONS = {"beta": Option(0.5, 0.0, 1.0), "rate": Option(1.0)}  # noqa: RUF012
    STATES = ("anchor", "momentum")
    CHANGES = "replicas take tau independent steps; an outer momentum moves their average on"

    def update(
        self, x: Tensor, average: Tensor, states: Mapping[str, Tensor], now: LearningRates
    ) -> None:
        """Applies the slow momentum step."""
        anchor, momentum = states["anchor"], states["momentum"]
        gamma = now.rate or 1.0
        momentum.mul_(self.number("beta")).add_((anchor - average).div_(gamma))
        anchor.sub_(momentum * (self.number("rate") * gamma))
        x.copy_(anchor)

"""DiLoCo (Douillard et al., arXiv:2311.08105) and streaming DiLoCo (arXiv:2501.18512).

    g = mean(anchor - x)
    m = beta m + g,    anchor = anchor - rate (g + beta m)        torch's Nesterov momentum
    x = (1 - alpha) anchor + alpha x

A fragment of the parameters is sent `delay` steps before its update. The updates of F fragments are
spread evenly over a round of tau steps: fragment f is updated after step ceil((f + 1) tau / F).
Messages may be int8 blocks of the differences.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.runtime.outer.method import LearningRates, Option, PromptMethod


class DiLoCo(PromptMethod):
    """Applies outer SGD with Nesterov momentum to averaged differences."""

    NAME = "diloco"
    OPTIONS = {  # noqa: RUF012
        "rate": Option(0.7),
        "beta": Option(0.9, 0.0, 1.0),
        "fragments": Option(1, 1, 10_000, whole=True),
        "delay": Option(0, 0, 10_000, whole=True),
        "alpha": Option(0.0, 0.0, 1.0),
        "message": Option("full", 1.0, 0.0, ("full", "int8")),
    }
    STATES = ("anchor", "momentum")
    CHANGES = "replicas take tau independent steps; an outer Nesterov step follows their average"

    @property
    def states(self) -> tuple[str, ...]:
        """The anchor, and its momentum if beta is not 0."""
        return self.STATES if self.number("beta") else ("anchor",)

    @property
    def fragments(self) -> int:
        """The option of the same name."""
        return int(self.number("fragments"))

    @property
    def delay(self) -> int:
        """The option of the same name."""
        return int(self.number("delay"))

    @property
    def quantised(self) -> bool:
        """Returns whether differences are sent as int8 blocks."""
        return self.options["message"] == "int8"

    def outgoing(self, x: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Returns the difference between the anchor and the replica's parameters."""
        return states["anchor"] - x

    def update(
        self, x: Tensor, average: Tensor, states: Mapping[str, Tensor], now: LearningRates
    ) -> None:
        """Updates the anchor, and sets x to a mixture of both."""
        anchor, beta, step = states["anchor"], self.number("beta"), average
        if beta:
            momentum = states["momentum"]
            momentum.mul_(beta).add_(average)
            step = average + beta * momentum
        anchor.sub_(self.number("rate") * step)
        alpha = self.number("alpha")
        if alpha:
            x.lerp_(anchor, 1 - alpha)
        else:
            x.copy_(anchor)

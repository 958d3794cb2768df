"""DiLoCo (Douillard et al., arXiv:2311.08105) and streaming DiLoCo (arXiv:2501.18512).

    g = mean(anchor - x)
    m = beta m + g,    anchor = anchor - rate (g + beta m)        torch's Nesterov momentum
    x = (1 - alpha) anchor + alpha x

A fragment of the parameters leaves `delay` steps before its update. In a round of tau steps, the
updates of F fragments are spread evenly: fragment f's after step ceil((f + 1) tau / F). Messages
may be blocks of int8 of the differences.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.runtime.outer.method import Method, Now, Option


class DiLoCo(Method):
    """An outer SGD with Nesterov momentum on averaged differences."""

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
    CHANGES = "replicas take tau steps apart; an outer Nesterov momentum follows their average"

    @property
    def states(self) -> tuple[str, ...]:
        """The anchor, and its momentum if there is one."""
        return self.STATES if self.number("beta") else ("anchor",)

    @property
    def fragments(self) -> int:
        """As given."""
        return int(self.number("fragments"))

    @property
    def delay(self) -> int:
        """As given."""
        return int(self.number("delay"))

    @property
    def quantised(self) -> bool:
        """Whether differences go as blocks of int8."""
        return self.options["message"] == "int8"

    def outgoing(self, x: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Returns how far the replica has come from the anchor."""
        return states["anchor"] - x

    def update(self, x: Tensor, average: Tensor, states: Mapping[str, Tensor], now: Now) -> None:
        """Moves the anchor, and x to a mixture of both."""
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

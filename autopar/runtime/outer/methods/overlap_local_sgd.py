"""Overlap-Local-SGD (Wang et al., arXiv:2002.09539): pulls replicas towards a late average.

    x = (1 - alpha) x + alpha z                      at the end of a round, then in the background
    v = beta v + (mean(x) - z),    z = z + v         which completes at the end of the next one

Without beta this is the special case of Cooperative SGD (Wang & Joshi, arXiv:1808.07576) with one
auxiliary variable z that follows the average: alpha is the weight of z in a replica's update.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.runtime.outer.method import LateMethod, LearningRates, Option


class Overlap(LateMethod):
    """Pulls replicas towards an anchor that follows their average, one round late."""

    NAME = "overlap"
    OPTIONS = {"alpha": Option(0.6, 0.0, 1.0), "beta": Option(0.7, 0.0, 1.0)}  # noqa: RUF012
    STATES = ("anchor", "momentum")
    CHANGES = "replicas stay different, and are pulled towards an average that is a round old"

    @property
    def states(self) -> tuple[str, ...]:
        """The anchor, and its momentum if beta is not 0."""
        return self.STATES if self.number("beta") else ("anchor",)

    def exchange(
        self,
        x: Tensor,
        message: Tensor,
        arrived: bool,
        states: Mapping[str, Tensor],
        now: LearningRates,
    ) -> None:
        """Moves the anchor towards the last average, pulls x towards it, and sends x."""
        anchor = states["anchor"]
        if arrived and "momentum" in states:
            states["momentum"].mul_(self.number("beta")).add_(message - anchor)
            anchor.add_(states["momentum"])
        elif arrived:
            anchor.copy_(message)
        x.lerp_(anchor, self.number("alpha"))
        message.copy_(x)

"""CO2 (Sun et al., arXiv:2401.16265, algorithm 1): averages of round t arrive during round t + 1.

    m = clip(beta m + (anchor - mean(x of the previous round)) / penalty)
    anchor = anchor - rate m,    the next round starts from the anchor

In the first round no average has arrived, so replicas continue from their own parameters. Every
element is clipped to `clip`; the authors' published code discards the clipped tensor, so that
clipping has no effect, and keeps the penalty constant. This module follows the paper in both, and
either can be disabled. The penalty is the given number, or

    1 + gamma / (maximal gamma so far),    gamma the inner learning rate,

since the gap between an average and the anchor grows with the learning rate.

The formula uses the current anchor, which has moved since the averaged round began. The difference
therefore undoes this movement: with beta 0 and penalty 1, two sequences of parameters alternate,
and each advances only in every second round. With `origin=round`, an average is compared with the
anchor at the beginning of its own round, and no progress is lost. Every round then begins from the
anchor, and a fourth copy is kept, as the paper counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.runtime.outer.method import OFF, LateMethod, LearningRates, Option

_RATE, _ROUND = "rate", "round"


class CO2(LateMethod):
    """Applies outer momentum to averages that are one round old."""

    NAME = "co2"
    OPTIONS = {  # noqa: RUF012
        "beta": Option(0.2, 0.0, 1.0),
        "rate": Option(1.0),
        "penalty": Option(_RATE, 1.0, 1e6, (_RATE, OFF)),
        "clip": Option(1.0, 1e-12, 1e12, (OFF,)),
        "origin": Option("anchor", 1.0, 0.0, ("anchor", _ROUND)),
    }
    STATES = ("anchor", "momentum")
    CHANGES = "replicas take tau independent steps; an outer momentum uses averages a round late"

    @property
    def states(self) -> tuple[str, ...]:
        """The anchor and its momentum; and where the last round began, if that is the origin."""
        return (*self.STATES, "began") if self.options["origin"] == _ROUND else self.STATES

    def exchange(
        self,
        x: Tensor,
        message: Tensor,
        arrived: bool,
        states: Mapping[str, Tensor],
        now: LearningRates,
    ) -> None:
        """Applies the outer step to the last average and sends the result of the round."""
        anchor, momentum, began = states["anchor"], states["momentum"], states.get("began")
        if arrived:
            gap = (anchor if began is None else began) - message
            momentum.mul_(self.number("beta")).add_(gap.div_(self.penalty(now)))
            if self.options["clip"] != OFF:
                momentum.clamp_(-self.number("clip"), self.number("clip"))
        if began is not None:
            began.copy_(anchor)  # of the round that ends now, whose average is sent
        if arrived:
            anchor.sub_(momentum * self.number("rate"))
        message.copy_(x)
        if arrived or began is not None:
            x.copy_(anchor)

    def penalty(self, now: LearningRates) -> float:
        """Returns the penalty of the staleness gap."""
        given = self.options["penalty"]
        if given == OFF:
            return 1.0
        return 1.0 + now.rate / now.highest if given == _RATE else float(given)

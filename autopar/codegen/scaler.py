"""Loss scaling for float16: small gradients would vanish, so those of a larger loss are computed.

The scale follows the largest that does not overflow (arXiv:1710.03740, section 3.2), by the rule of
torch.amp.GradScaler: a step whose gradients are not finite on some rank is left out on all of them,
and the scale halved; after 2000 steps that were not it is doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Scaler:
    """The scale of the loss, alike on all ranks.

    Attributes:
        scale: by which the loss is multiplied.
        growth, backoff: by which the scale is multiplied after `interval` steps without an
            overflow, and after one with.
        interval: see there.
        good: steps since the last overflow or growth.
        skipped: whether the last step was left out.
    """

    def __init__(self) -> None:
        self.scale, self.growth, self.backoff, self.interval = 2.0**16, 2.0, 0.5, 2000
        self.good, self.skipped = 0, False

    @torch.no_grad()
    def unscale(
        self, gradients: Iterable[Tensor | None], largest: Callable[[Tensor], Tensor]
    ) -> bool:
        """Divide the gradients by the scale, and choose the next one.

        Args:
            gradients: of this rank, changed in place.
            largest: gives the largest of a number over all ranks.

        Returns:
            Whether all gradients of all ranks are finite, so that the step may be made.
        """
        found = [gradient for gradient in gradients if gradient is not None]
        device = found[0].device if found else None
        broken = torch.zeros((), device=device)
        for gradient in found:
            gradient.mul_(1 / self.scale)
            broken = torch.maximum(broken, (~torch.isfinite(gradient)).any().float())
        self.follow(not bool(largest(broken)))
        return not self.skipped

    def follow(self, finite: bool) -> None:
        """Choose the next scale after gradients that were, or were not, finite on all ranks."""
        self.skipped = not finite
        if self.skipped:
            self.scale, self.good = self.scale * self.backoff, 0
        else:
            self.good += 1
            if self.good >= self.interval:
                self.scale, self.good = self.scale * self.growth, 0

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on."""
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.scale, self.good = float(state["scale"]), int(state["good"])

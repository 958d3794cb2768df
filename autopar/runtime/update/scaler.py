"""Loss scaling for float16: small gradients would vanish, so those of a larger loss are computed.

The scale follows the largest that does not overflow (arXiv:1710.03740, section 3.2), by the rule of
torch.amp.GradScaler: a step whose gradients are not finite on some rank is left out on all of them,
and the scale halved; after 2000 steps that were not it is doubled. All of that lies on the device,
so that a step need not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_LEAST = 1e-4  # of a scale that still has a purpose


class Scaler:
    """The scale of the loss, alike on all ranks.

    Args:
        device: where gradients are.

    Attributes:
        factor: by which the loss is multiplied, f32[] on the device.
        growth, backoff: by which the scale is multiplied after `interval` steps without an
            overflow, and after one with.
        interval: see there.
    """

    def __init__(self, device: torch.device) -> None:
        self.growth, self.backoff, self.interval = 2.0, 0.5, 2000
        self.factor = torch.full((), 2.0**16, device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def scale(self) -> float:
        """By what the loss is multiplied; waits for the device."""
        return float(self.factor)

    @property
    def good(self) -> int:
        """Steps since the last overflow or growth; waits for the device."""
        return int(self._good)

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out; waits for the device."""
        return bool(self._skipped)

    @property
    def useful(self) -> Tensor:
        """Whether an overflow may be the scale's fault, bool[] on the device.

        Below 1e-4 it is the model's own (fairseq's `min_loss_scale`).
        """
        return self.factor >= _LEAST

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor | None]) -> None:
        """Divide gradients by the scale, in place."""
        inverse = 1 / self.factor
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(inverse)

    @torch.no_grad()
    def follow(self, finite: Tensor) -> None:
        """Choose the next scale after gradients that were, or were not, finite on all ranks.

        Args:
            finite: bool[] on the device. Nothing waits for it.
        """
        good = self._good + 1
        grown = good >= self.interval
        after = torch.where(grown, self.factor * self.growth, self.factor)
        self.factor.copy_(torch.where(finite, after, self.factor * self.backoff))
        self._good.copy_(torch.where(finite & ~grown, good, 0))
        self._skipped.copy_(~finite)

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on."""
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.factor.fill_(float(state["scale"]))
        self._good.fill_(int(state["good"]))

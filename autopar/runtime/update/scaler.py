"""Loss scaling for float16, which keeps small gradients from vanishing.

The scale follows the largest one that does not overflow (arXiv:1710.03740, section 3.2), by the
rule of torch.amp.GradScaler: a step whose gradients are not finite on some rank is skipped on all
of them, and the scale halved; after 2000 finite steps it is doubled. All of this is on the device,
so that a step need not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_LEAST = 1e-4  # least scale that still serves its purpose


class Scaler:
    """The scale of the loss, equal on all ranks.

    Args:
        device: device of the gradients.

    Attributes:
        factor: factor of the loss, f32[] on the device.
        growth, backoff: factors of the scale after `interval` steps without an overflow, and after
            a step with one.
        interval: number of steps until it grows.
    """

    def __init__(self, device: torch.device) -> None:
        self.growth, self.backoff, self.interval = 2.0, 0.5, 2000
        self.factor = torch.full((), 2.0**16, device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def scale(self) -> float:
        """Factor of the loss; waits for the device."""
        return float(self.factor)

    @property
    def good(self) -> int:
        """Steps since the last overflow or growth; waits for the device."""
        return int(self._good)

    @property
    def skipped(self) -> bool:
        """Returns whether the last step was skipped; waits for the device."""
        return bool(self._skipped)

    @property
    def useful(self) -> Tensor:
        """Returns whether the scale may be to blame for an overflow, bool[] on the device.

        Below 1e-4 it is the model's own (fairseq's `min_loss_scale`).
        """
        return self.factor >= _LEAST

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Yields its tensors by the names of `ir/update/kept_states.shared_states`."""
        yield from (("loss_scale", self.factor), ("good_steps", self._good))

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor | None]) -> None:
        """Divides gradients by the scale, in place."""
        inverse = 1 / self.factor
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(inverse)

    @torch.no_grad()
    def follow(self, finite: Tensor) -> None:
        """Updates the scale after gradients that were, or were not, finite on all ranks.

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
        """Returns the state needed to continue."""
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self.factor.fill_(float(state["scale"]))
        self._good.fill_(int(state["good"]))

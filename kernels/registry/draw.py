"""Random tensors for samples: equal on every call, of one dtype, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


class Draw:
    """Draws the tensors of a sample.

    On the device "meta" they have no elements, since shapes are enough to compile a kernel.
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._seeded = torch.Generator("cpu" if device == "meta" else device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Returns normally distributed values, of the sample's dtype or another."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        drawn = torch.randn(shape, generator=self._seeded, device=self.device)
        return (drawn * scale).to(dtype or self.dtype)

    def positive(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns values between 1/2 and 3/2."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        drawn = torch.rand(shape, generator=self._seeded, device=self.device)
        return (drawn + 0.5).to(dtype or self.dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Returns integers from 0 up to `high`."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randint(high, shape, generator=self._seeded, device=self.device, dtype=dtype)

"""Copies between a device and its host: pinned memory, with one stream per direction.

On a CPU, host and device share their memory; a copy is nevertheless made, immediately, so that
device memory is counted equally on all devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class OffloadCopy:
    """A tensor on its way to host memory.

    Attributes:
        host: its destination.
        source: on the device; kept until the copy is done.
        done: event of the end of the copy, None if immediate.
    """

    host: Tensor
    source: Tensor | None = None
    done: torch.cuda.Event | None = None


@dataclass
class ReloadCopy:
    """A tensor on its way back: its destination, and the event of arrival, None if immediate."""

    tensor: Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """Returns the tensor; later computation on the device waits for it."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.done)
            self.done = None
        return self.tensor


class Host:
    """The host of one device.

    Args:
        device: the device.

    Attributes:
        overlaps: whether copies overlap with computation.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.overlaps = device, device.type == "cuda"
        self._there = torch.cuda.Stream(device) if self.overlaps else None
        self._back = torch.cuda.Stream(device) if self.overlaps else None

    def put(self, tensor: Tensor, into: Tensor | None = None) -> OffloadCopy:
        """Starts copying a tensor to host memory.

        Args:
            tensor: a tensor on the device.
            into: host memory for it; by default new, pinned for accelerators.
        """
        if into is None:
            shape, dtype = tensor.shape, tensor.dtype
            into = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.overlaps)
        if self._there is None:
            into.copy_(tensor)
            return OffloadCopy(into)
        self._there.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._there):
            into.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._there)
        return OffloadCopy(into, tensor, done)

    def gone(self, put: OffloadCopy) -> None:
        """Frees the memory on the device for later computation."""
        if put.done is not None and put.source is not None:
            torch.cuda.current_stream(self.device).wait_event(put.done)
            put.source = None

    def take(self, put: OffloadCopy) -> ReloadCopy:
        """Starts copying back; its memory on the device is allocated at once."""
        tensor = torch.empty(put.host.shape, dtype=put.host.dtype, device=self.device)
        if self._back is None:
            return ReloadCopy(tensor.copy_(put.host))
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back):
            if put.done is not None:
                self._back.wait_event(put.done)
            tensor.copy_(put.host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._back)
        return ReloadCopy(tensor, done)

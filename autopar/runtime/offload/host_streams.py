"""Copies between a device and its host: pinned memory, each way on a stream of its own.

On a CPU the host's memory is the device's; a copy there is a copy, made at once, so that what a
device holds is the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Put:
    """A tensor that goes to host memory.

    Attributes:
        host: where it will be.
        source: on the device; kept until the copy is done.
        done: when it is, None at once.
    """

    host: Tensor
    source: Tensor | None = None
    done: torch.cuda.Event | None = None


@dataclass
class Taken:
    """A tensor that comes back: what will be on the device, and when, None at once."""

    tensor: Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The tensor; what the device computes from now on finds it there."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.done)
            self.done = None
        return self.tensor


class Host:
    """The host of one device.

    Args:
        device: whose host it is.

    Attributes:
        beside: whether copies run while the device computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.beside = device, device.type == "cuda"
        self._there = torch.cuda.Stream(device) if self.beside else None
        self._back = torch.cuda.Stream(device) if self.beside else None

    def put(self, tensor: Tensor, into: Tensor | None = None) -> Put:
        """Begin to copy a tensor to host memory.

        Args:
            tensor: on the device.
            into: host memory for it; by default new, pinned where there is a device.
        """
        if into is None:
            shape, dtype = tensor.shape, tensor.dtype
            into = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.beside)
        if self._there is None:
            into.copy_(tensor)
            return Put(into)
        self._there.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._there):
            into.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._there)
        return Put(into, tensor, done)

    def gone(self, put: Put) -> None:
        """Let the memory on the device be used for what is computed from now on."""
        if put.done is not None and put.source is not None:
            torch.cuda.current_stream(self.device).wait_event(put.done)
            put.source = None

    def take(self, put: Put) -> Taken:
        """Begin to copy it back; its memory on the device is there at once."""
        made = torch.empty(put.host.shape, dtype=put.host.dtype, device=self.device)
        if self._back is None:
            return Taken(made.copy_(put.host))
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back):
            if put.done is not None:
                self._back.wait_event(put.done)
            made.copy_(put.host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._back)
        return Taken(made, done)

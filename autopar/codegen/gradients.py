"""Gradients are synchronised beside the backward: only the optimizer waits for them.

The move of a gradient next to its parameter - data parallelism's all_reduce, ZeRO-3's
reduce_scatter - ends a path of the backward: nothing that is still to be computed needs its result.
On a CUDA device it runs on a stream of its own while the backward goes on (Li et al., "PyTorch
Distributed", VLDB 13(12), 2020, sec. 3.2.3, overlaps all_reduces so); elsewhere it runs at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Gradients:
    """The gradients of one backward on one device.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._moved: list[tuple[Tensor, Tensor]] = []

    def move(self, parameter: Tensor, gradient: Tensor, move: Callable[[Tensor], Tensor]) -> None:
        """Begin to move the gradient of `parameter`; `collect` stores what comes of it."""
        if self._stream is None:
            self._moved.append((parameter, move(gradient)))
            return
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        gradient.record_stream(self._stream)  # its memory is in use until then
        with torch.cuda.stream(self._stream):
            self._moved.append((parameter, move(gradient)))

    def collect(self) -> None:
        """Wait for the moves, and add the results to the parameters' gradients."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for parameter, gradient in self._moved:
            if self._stream is not None:
                gradient.record_stream(torch.cuda.current_stream(self._stream.device))
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._moved.clear()

    def drop(self) -> None:
        """Forget the moves of a backward that failed."""
        self._moved.clear()

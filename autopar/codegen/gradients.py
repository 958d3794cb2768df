"""Gradients are synchronised beside the backward: only the optimizer waits for them.

The move of a gradient next to its parameter - data parallelism's all_reduce, ZeRO-3's
reduce_scatter - ends a path of the backward: nothing that is still to be computed needs its result.
On a CUDA device it runs on a stream of its own while the backward goes on (Li et al., "PyTorch
Distributed", VLDB 13(12), 2020, sec. 3.2.3, overlaps all_reduces so). Elsewhere all_reduces run at
the end, all of a group as one, since each of them waits for the slowest process; other moves run at
once.

Where a step has several backwards, one for each microbatch, the gradients are added up first and
moved once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.codegen.group import Group
from autopar.codegen.torch_private import all_reduce_many

Move = Callable[[Tensor], Tensor]


@dataclass
class _Owed:
    """A gradient that is not moved yet: the sum so far, and of how many backwards it is."""

    parameter: Tensor
    total: Tensor
    move: Move
    count: int = 1

    def add(self, gradient: Tensor) -> None:
        """One more backward's."""
        # The first one may be a tensor that others hold too; a sum is our own.
        self.total = self.total + gradient if self.count == 1 else self.total.add_(gradient)
        self.count += 1


class Gradients:
    """The gradients of one step on one device.

    Args:
        device: where they are.
        rounds: how many backwards a step has.
    """

    def __init__(self, device: torch.device, rounds: int = 1) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._rounds = rounds
        self._owed: dict[int, _Owed] = {}
        self._moved: list[tuple[Tensor, Tensor]] = []
        self._sums: dict[tuple[tuple[str, ...], torch.dtype], tuple[Group, list[Tensor]]] = {}

    def move(self, parameter: Tensor, gradient: Tensor, move: Move) -> None:
        """Move the gradient of `parameter` after the last backward that gives it one.

        `collect` stores what comes of it.
        """
        owed = self._owed.get(id(parameter))
        if owed is None:
            owed = self._owed[id(parameter)] = _Owed(parameter, gradient, move)
        else:
            owed.add(gradient)
        if owed.count == self._rounds:
            self._begin(self._owed.pop(id(parameter)))

    def _begin(self, owed: _Owed) -> None:
        gradient = owed.total
        if self._stream is None:
            group = _summed_over(owed.move)
            if group is None:
                self._moved.append((owed.parameter, owed.move(gradient)))
                return
            total = gradient.clone(memory_format=torch.contiguous_format)
            key = (tuple(sorted(group.axes)), total.dtype)
            self._sums.setdefault(key, (group, []))[1].append(total)
            self._moved.append((owed.parameter, total))
            return
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        gradient.record_stream(self._stream)  # its memory is in use until then
        with torch.cuda.stream(self._stream):
            self._moved.append((owed.parameter, owed.move(gradient)))

    def collect(self) -> None:
        """Wait for the moves, and add the results to the parameters' gradients."""
        for owed in self._owed.values():
            self._begin(owed)
        self._owed.clear()
        for group, totals in self._sums.values():
            assert group.process_group is not None
            all_reduce_many(totals, group.process_group)
        self._sums.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for parameter, gradient in self._moved:
            if self._stream is not None:
                gradient.record_stream(torch.cuda.current_stream(self._stream.device))
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._moved.clear()

    def drop(self) -> None:
        """Forget the moves of a backward that failed."""
        self._owed.clear()
        self._moved.clear()
        self._sums.clear()


def _summed_over(move: Move) -> Group | None:
    """The group of a move that is an all_reduce, None for others."""
    owner = getattr(move, "__self__", None)
    return owner if isinstance(owner, Group) and move == owner.reduce else None

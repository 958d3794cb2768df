"""Reduces gradients during the backward: only the optimizer waits for them.

The exchange of a parameter's gradient (data parallelism's all_reduce, ZeRO-3's reduce_scatter, or
one of them inside groups of devices and one between them) ends a path of the backward: no further
computation needs its result. Gradients therefore wait for others with the same collectives, in the
order of the backward, and when a buffer is full one collective sends them all (Li et al., "PyTorch
Distributed", VLDB 13(12), 2020, sec. 3.2.3). On a CUDA device it runs on its own stream while the
backward continues. Elsewhere it runs at once; but all_reduces, which save no memory, run at the
end, in one call per group, since each call waits for the slowest process. If nothing else happens
to a gradient, autograd itself accumulates it until then. Tensors from the backward are never
written to: an all_reduce sums in the buffer that they are copied into.

A step of several microbatches accumulates gradients as far as they are split (`Storage.grads`), and
reduces the sums once to the layout of the update. In mixed precision a gradient is cast at once to
the dtype in which it is sent, and accumulated in that of the master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.parameters.flat_buffers import side_by_side
from autopar.runtime.parameters.shards import Bucket, Room, Weight, Weights


@dataclass
class _Sum:
    """The sum of a parameter's gradients so far, and the number of microbatches in it."""

    weight: Weight
    total: Tensor
    own: bool  # whether no one else can refer to that tensor
    count: int = 1

    def add(self, gradient: Tensor) -> None:
        """Adds one gradient."""
        self.total = self.total.add_(gradient) if self.own else self.total + gradient
        self.own, self.count = True, self.count + 1


class Gradients:
    """The gradients of one step on one device.

    Args:
        weights: the parameters; parameters of further stages on this mesh are appended later.
        device: device of the parameters.
        rounds: backwards per step.
        order: id of an updated tensor -> number; only gradients with one number are sent together.
        room: returns a flat tensor for the gradient shards of some parameters, or None.
        overlaps: whether collectives run on a stream of their own on a GPU.

    Attributes:
        weights: parameters with collectives, by the id of the stored tensor.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        rounds: int = 1,
        order: Mapping[int, int] | None = None,
        room: Room = lambda weights: None,
        overlaps: bool = True,
    ) -> None:
        self.weights = dict(weights.moving)
        beside = overlaps and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if beside else None
        self._rounds, self._order, self._room = rounds, order or {}, room
        self._parts = Bucket(weights.comm, weights.bucket, "accumulate", order, self._first)
        self._whole = Bucket(weights.comm, weights.bucket, "reduce", order, room)
        self._sums: dict[int, _Sum] = {}
        self._left: dict[Weight, Tensor | None] = {}  # left to autograd; the earlier gradient
        self._done: list[tuple[Weight, Tensor]] = []

    def leave(self, weight: Weight) -> bool:
        """Returns whether autograd accumulates a parameter's gradients itself, until `collect`."""
        if self._stream is not None or not weight.only_summed:
            return False
        if torch.is_grad_enabled() and weight not in self._left:
            self._left[weight], weight.held.grad = weight.held.grad, None
        return True

    def take(self, weight: Weight, gradient: Tensor) -> None:
        """Accepts a parameter's gradient from a backward, in the layout of the parameter's use.

        `collect` stores the result.
        """
        with self._beside(gradient):
            if weight.path("accumulate"):
                self._add(self._parts.add(weight, gradient.to(weight.sent)), own=True)
            else:
                self._add([(weight, gradient)], own=False)

    def end_of_backward(self) -> None:
        """Sends waiting gradients to be accumulated, before the next backward produces more."""
        with self._beside():
            self._add(self._parts.empty(), own=True)

    def collect(self) -> None:
        """Waits for everything, and stores the gradients where the optimizer reads them."""
        self.end_of_backward()
        with self._beside():
            for late in list(self._sums.values()):  # without a gradient in some microbatch
                self._reduce(late)
            self._sums.clear()
            for weight, before in self._left.items():
                gradient, weight.held.grad = weight.held.grad, before
                if gradient is not None:
                    self._done += self._whole.add(weight, gradient.to(weight.sent))
            self._left.clear()
            self._done += self._whole.empty()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            for _, gradient in self._done:
                gradient.record_stream(torch.cuda.current_stream(self._stream.device))
        done = self._widened()
        while done:  # so that a cast gradient is freed before the next one is cast
            weight, gradient = done.pop()
            known, total = weight.updated.grad, gradient.to(weight.updated.dtype)
            weight.updated.grad = total if known is None else known + total

    def _widened(self) -> list[tuple[Weight, Tensor]]:
        """Takes finished gradients; neighbours that need a cast are cast into one buffer."""
        rows: dict[tuple[object, ...], list[int]] = {}
        done, self._done = self._done, []
        for place, (weight, gradient) in enumerate(done):
            own, number = weight.updated.dtype, self._order.get(id(weight.updated))
            if number is not None and gradient.dtype != own:
                rows.setdefault((number, own), []).append(place)
        for places in rows.values():
            dtype = done[places[0]][0].updated.dtype
            casts = side_by_side([done[place][1] for place in places], dtype)
            for place, gradient in zip(places, casts, strict=True):
                done[place] = done[place][0], gradient
        return done

    def give_up(self) -> None:
        """Leaves accumulated gradients in place, for callers that sum them over the devices."""
        self._left.clear()

    def saved(self, weight: Weight, put: Callable[[Tensor], Any]) -> Any:
        """Returns a parameter's accumulated gradients, each passed through `put`; None without any.

        It must be called between two microbatches, when no gradient waits to be sent.
        """
        known, left = self._sums.get(id(weight)), weight in self._left
        if known is None and not left:
            return None
        before = self._left.get(weight)
        return [
            left,
            None if before is None else put(before),
            None if known is None else [put(known.total), known.count],
        ]

    def resume(self, weight: Weight, saved: Any, get: Callable[[Any], Tensor]) -> None:
        """Takes that back."""
        left, before, known = saved
        if left:
            self._left[weight] = None if before is None else get(before)
        if known is not None:
            self._sums[id(weight)] = _Sum(weight, get(known[0]), True, known[1])

    def drop(self) -> None:
        """Discards the remains of a backward that failed."""
        self._parts.drop()
        self._whole.drop()
        self._sums.clear()
        for weight, before in self._left.items():
            weight.held.grad = before
        self._left.clear()
        self._done.clear()

    def _first(self, weights: Sequence[Weight]) -> Tensor | None:
        """Returns room for the first gradients of a step, to which the others are added."""
        others = any(id(weight) in self._sums or weight.path("reduce") for weight in weights)
        return None if others else self._room(weights)

    def _add(self, arrived: list[tuple[Weight, Tensor]], own: bool) -> None:
        for weight, gradient in arrived:
            known = self._sums.get(id(weight))
            if known is None:
                # Accumulation uses the dtype of the update.
                total = gradient if self._rounds == 1 else gradient.to(weight.updated.dtype)
                own = own or total is not gradient
                known = self._sums[id(weight)] = _Sum(weight, total, own)
            else:
                known.add(gradient)
            if known.count == self._rounds:
                self._reduce(self._sums.pop(id(weight)))

    def _reduce(self, known: _Sum) -> None:
        path, total = known.weight.path("reduce"), known.total
        if not path:
            self._done.append((known.weight, total))
            return
        self._done += self._whole.add(known.weight, total.to(known.weight.sent))

    @contextmanager
    def _beside(self, gradient: Tensor | None = None) -> Iterator[None]:
        """Returns a context that overlaps with the backward, once `gradient` is ready."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if gradient is not None:
            gradient.record_stream(self._stream)  # keeps its memory from being reused
        with torch.cuda.stream(self._stream):
            yield

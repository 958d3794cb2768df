"""Gradients are reduced beside the backward: only the optimizer waits for them.

What becomes of a parameter's gradient - data parallelism's all_reduce, ZeRO-3's reduce_scatter, or
one of them inside groups of devices and one between them - ends a path of the backward: nothing
that is still to be computed needs its result. So gradients wait for others that go the same way, in
the order in which the backward makes them, and when a buffer is full one collective takes them all
(Li et al., "PyTorch Distributed", VLDB 13(12), 2020, sec. 3.2.3). On a CUDA device that runs on a
stream of its own while the backward goes on. Elsewhere it runs at once; but all_reduces, which save
no memory, run at the end, all of a group as one, since each of them waits for the slowest process.
Where that is all that becomes of a gradient, autograd itself adds it up until then.
Nobody may write to what the backward gives: an all_reduce sums in the buffer that it is put into.

A step of several microbatches adds gradients up as far as they are split (`Storage.grads`), and
takes the sums to where they are updated once. In mixed precision a gradient is cast to the dtype in
which it is sent as soon as it is made, and added up in that of the master.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.parameters.flat_buffers import side_by_side
from autopar.runtime.parameters.shards import Bucket, Room, Weight, Weights


@dataclass
class _Sum:
    """The sum of a parameter's gradients so far, and of how many microbatches it is."""

    weight: Weight
    total: Tensor
    own: bool  # whether nobody else may hold that tensor
    count: int = 1

    def add(self, gradient: Tensor) -> None:
        """One more."""
        self.total = self.total.add_(gradient) if self.own else self.total + gradient
        self.own, self.count = True, self.count + 1


class Gradients:
    """The gradients of one step on one device.

    Args:
        weights: the parameters; those of further stages on this mesh are added to `weights`.
        device: where they are.
        rounds: how many backwards a step has.
        order: by the ids of what is updated a number; gradients of one number go together.
        room: gives a flat tensor for the parts of gradients of some parameters, or None.

    Attributes:
        weights: the parameters that are exchanged, by the id of the tensor that is held.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        rounds: int = 1,
        order: Mapping[int, int] | None = None,
        room: Room = lambda weights: None,
    ) -> None:
        self.weights = dict(weights.moving)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._rounds, self._order, self._room = rounds, order or {}, room
        self._parts = Bucket(weights.comm, weights.bucket, "accumulate", order, self._first)
        self._whole = Bucket(weights.comm, weights.bucket, "reduce", order, room)
        self._sums: dict[int, _Sum] = {}
        self._left: dict[Weight, Tensor | None] = {}  # to autograd; what was there before
        self._done: list[tuple[Weight, Tensor]] = []

    def leave(self, weight: Weight) -> bool:
        """Whether autograd adds up a parameter's gradients where they are, until `collect`."""
        if self._stream is not None or not weight.only_summed:
            return False
        if torch.is_grad_enabled() and weight not in self._left:
            self._left[weight], weight.held.grad = weight.held.grad, None
        return True

    def take(self, weight: Weight, gradient: Tensor) -> None:
        """The gradient that a backward gives a parameter, of the layout in which it is used.

        `collect` stores what comes of it.
        """
        with self._beside(gradient):
            if weight.path("accumulate"):
                self._add(self._parts.add(weight, gradient.to(weight.sent)), own=True)
            else:
                self._add([(weight, gradient)], own=False)

    def end_of_backward(self) -> None:
        """Send what waits to be added up, before the next backward brings more of it."""
        with self._beside():
            self._add(self._parts.empty(), own=True)

    def collect(self) -> None:
        """Wait for everything, and store the gradients where the optimizer looks for them."""
        self.end_of_backward()
        with self._beside():
            for late in list(self._sums.values()):  # that had no gradient of some microbatch
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
        for weight, gradient in self._widened():
            known, total = weight.updated.grad, gradient.to(weight.updated.dtype)
            weight.updated.grad = total if known is None else known + total
        self._done.clear()

    def _widened(self) -> list[tuple[Weight, Tensor]]:
        """What is done; of those that lie together, what is to be cast is cast into one buffer."""
        rows: dict[tuple[object, ...], list[int]] = {}
        done = list(self._done)
        for place, (weight, gradient) in enumerate(done):
            own, number = weight.updated.dtype, self._order.get(id(weight.updated))
            if number is not None and gradient.dtype != own:
                rows.setdefault((number, own), []).append(place)
        for places in rows.values():
            dtype = done[places[0]][0].updated.dtype
            made = side_by_side([done[place][1] for place in places], dtype)
            for place, gradient in zip(places, made, strict=True):
                done[place] = done[place][0], gradient
        return done

    def give_up(self) -> None:
        """Leave what autograd has added up where it is, for who sums it over the devices."""
        self._left.clear()

    def drop(self) -> None:
        """Forget what a backward that failed has left."""
        self._parts.drop()
        self._whole.drop()
        self._sums.clear()
        for weight, before in self._left.items():
            weight.held.grad = before
        self._left.clear()
        self._done.clear()

    def _first(self, weights: Sequence[Weight]) -> Tensor | None:
        """Room for the first gradients of a step, to which the others are added there."""
        others = any(id(weight) in self._sums or weight.path("reduce") for weight in weights)
        return None if others else self._room(weights)

    def _add(self, arrived: list[tuple[Weight, Tensor]], own: bool) -> None:
        for weight, gradient in arrived:
            known = self._sums.get(id(weight))
            if known is None:
                # What is added up is added up in the dtype of the update.
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
        """What is done inside is done beside the backward, once `gradient` is there."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if gradient is not None:
            gradient.record_stream(self._stream)  # its memory is in use until then
        with torch.cuda.stream(self._stream):
            yield

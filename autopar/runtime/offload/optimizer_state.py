"""Optimizer state in host memory: a bucket of it comes to the device, is updated and goes back.

Masters of mixed precision are state like any other: between updates a parameter of the optimizer is
an empty place, with its master's shape and dtype, for the gradient to be stored at. Each bucket is
a step of the optimizer in which no other parameter has a gradient, so that any torch optimizer will
do that updates every parameter by itself. On accelerators the next bucket comes and the last one
goes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.ir.offload import rows
from autopar.runtime.offload.host_streams import Host, Put, Taken

Slot = tuple[MutableMapping[Any, Any], Any]  # where a tensor is kept: a mapping, and its key


class HostState:
    """The state of one optimizer, and averages of what it updates, in host memory.

    Args:
        optimizer: of this rank.
        parameters: what it updates.
        averages: of them, by their id; {} without.
        device: where the update runs.
        bucket: bytes of parameters whose state comes together, or little more.
        masters: ids of parameters that lie there as well.

    Attributes:
        masters: the values of these, wherever they lie, by the ids.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        averages: MutableMapping[int, Tensor],
        device: torch.device,
        bucket: int,
        masters: Collection[int] = (),
    ) -> None:
        self._optimizer, self._averages = optimizer, averages
        self._host = Host(device)
        self._rows = list(rows(parameters, bucket))
        self._puts: dict[tuple[int, Any], Put] = {}
        self.masters = {id(p): p.detach() for p in parameters if id(p) in masters}

    def settle(self) -> None:
        """Take to the host what is not there: what was loaded, or begun on the device."""
        for row in self._rows:
            self._empty(row)
            for put in self._go(row):
                self._host.gone(put)

    def step(self, updated: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """One step of the optimizer.

        Args:
            updated: what is done with parameters once they are updated.
        """
        gradients = [[parameter.grad for parameter in row] for row in self._rows]
        for row in self._rows:
            _give(row, [None] * len(row))
        going: list[Put] = []
        try:
            coming = self._come(0)
            for number, row in enumerate(self._rows):
                for (kept, key), taken in coming:
                    kept[key] = taken.wait()
                coming = self._come(number + 1) if self._host.beside else []
                self._fill(row)
                _give(row, gradients[number])
                self._optimizer.step()
                updated(row)
                _give(row, [None] * len(row))
                self._empty(row)
                for put in going:
                    self._host.gone(put)
                going = self._go(row)
                coming = coming if self._host.beside else self._come(number + 1)
        finally:
            for put in going:
                self._host.gone(put)
            for row, given in zip(self._rows, gradients, strict=True):
                _give(row, given)

    def _slots(self, row: Sequence[nn.Parameter]) -> Iterator[Slot]:
        """Where the state of some parameters is kept; single numbers stay where they are."""
        for parameter in row:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    yield state, key
            for kept in (self._averages, self.masters):
                if id(parameter) in kept:
                    yield kept, id(parameter)

    def _fill(self, row: Sequence[nn.Parameter]) -> None:
        """Masters that have come are what the optimizer updates."""
        for parameter in row:
            parameter.data = self.masters.get(id(parameter), parameter.data)

    def _empty(self, row: Sequence[nn.Parameter]) -> None:
        """They are not, and may go."""
        for parameter in row:
            if id(parameter) in self.masters:
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)

    def _come(self, number: int) -> list[tuple[Slot, Taken]]:
        """Begin to bring a bucket to the device."""
        if number >= len(self._rows):
            return []
        return [
            ((kept, key), self._host.take(self._put_of(kept, key)))
            for kept, key in self._slots(self._rows[number])
        ]

    def _put_of(self, kept: MutableMapping[Any, Any], key: Any) -> Put:
        put = self._puts.get((id(kept), key))
        return put if put is not None and put.host is kept[key] else Put(kept[key])

    def _go(self, row: Sequence[nn.Parameter]) -> list[Put]:
        """Begin to take a bucket to the host, into the memory that it had there."""
        found = []
        for kept, key in self._slots(row):
            value, before = kept[key], self._puts.get((id(kept), key))
            if before is not None and before.host is value:
                continue  # it is there
            like = before is not None and before.host.dtype == value.dtype
            fits = before is not None and like and before.host.shape == value.shape
            put = self._host.put(value, before.host if before is not None and fits else None)
            self._puts[id(kept), key], kept[key] = put, put.host
            found.append(put)
        return found


def _give(row: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(row, gradients, strict=True):
        parameter.grad = gradient

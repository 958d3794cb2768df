"""Optimizer state in host memory: each bucket is copied to the device, updated and copied back.

Masters of mixed precision are treated as state: between updates, a parameter of the optimizer is an
empty placeholder with its master's shape and dtype, for the gradient to be stored at. Each bucket
is one step of the optimizer in which no other parameter has a gradient, so that any torch optimizer
that updates each parameter independently works. On accelerators the next bucket arrives and the
previous one leaves meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.ir.offload import rows
from autopar.runtime.offload.host_streams import Host, OffloadCopy, ReloadCopy

if TYPE_CHECKING:
    from autopar.runtime.parameters.shards import Weights

Slot = tuple[MutableMapping[Any, Any], Any]  # place of a tensor: a mapping, and its key


class HostState:
    """The state of one optimizer, and averages of its parameters, in host memory.

    Args:
        optimizer: the optimizer of this rank.
        rows: the parameters that it updates, in buckets, equal on all ranks.
        averages: averages by the parameter's id; {} without.
        device: device of the update.
        masters: ids of parameters that are also in host memory.
        wholes: what the optimizer updates in place of a parameter, by its id; see
            `autopar/runtime/update/owners.py`.

    Attributes:
        masters: values of these by id, wherever they are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: Sequence[Sequence[nn.Parameter]],
        averages: MutableMapping[int, Tensor],
        device: torch.device,
        masters: Collection[int] = (),
        wholes: Mapping[int, nn.Parameter] | None = None,
    ) -> None:
        self._optimizer, self._averages = optimizer, averages
        self._wholes = dict(wholes or {})
        self._host = Host(device)
        self._rows = [list(row) for row in rows]
        self._puts: dict[tuple[int, Any], OffloadCopy] = {}
        self.masters = {id(p): p.detach() for row in rows for p in row if id(p) in masters}

    def settle(self) -> None:
        """Moves loaded or new state from the device to the host."""
        for row in self._rows:
            self._empty(row)
            for put in self._go(row):
                self._host.gone(put)

    def step(
        self, updated: Callable[[Sequence[nn.Parameter]], None], step: Callable[[], None]
    ) -> None:
        """Makes one step of the optimizer.

        Args:
            updated: called with parameters once they are updated.
            step: makes a step of the parameters that have gradients.
        """
        gradients = [[parameter.grad for parameter in row] for row in self._rows]
        for row in self._rows:
            _give(row, [None] * len(row))
        going: list[OffloadCopy] = []
        try:
            coming = self._come(0)
            for number, row in enumerate(self._rows):
                for (kept, key), taken in coming:
                    kept[key] = taken.wait()
                coming = self._come(number + 1) if self._host.overlaps else []
                self._fill(row)
                _give(row, gradients[number])
                step()
                updated(row)
                _give(row, [None] * len(row))
                self._empty(row)
                for put in going:
                    self._host.gone(put)
                going = self._go(row)
                coming = coming if self._host.overlaps else self._come(number + 1)
        finally:
            for put in going:
                self._host.gone(put)
            for row, given in zip(self._rows, gradients, strict=True):
                _give(row, given)

    def _slots(self, row: Sequence[nn.Parameter]) -> Iterator[Slot]:
        """Yields the places of some parameters' state; single numbers are not moved."""
        for parameter in row:
            own = self._wholes.get(id(parameter), parameter)
            state = self._optimizer.state.get(own, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    yield state, key
            for kept in (self._averages, self.masters):
                if id(parameter) in kept:
                    yield kept, id(parameter)

    def _fill(self, row: Sequence[nn.Parameter]) -> None:
        """Gives the optimizer the masters that have arrived."""
        for parameter in row:
            parameter.data = self.masters.get(id(parameter), parameter.data)

    def _empty(self, row: Sequence[nn.Parameter]) -> None:
        """Takes the masters from the optimizer, so that they can leave."""
        for parameter in row:
            if id(parameter) in self.masters:
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)

    def _come(self, number: int) -> list[tuple[Slot, ReloadCopy]]:
        """Starts copying a bucket to the device."""
        if number >= len(self._rows):
            return []
        return [
            ((kept, key), self._host.take(self._put_of(kept, key)))
            for kept, key in self._slots(self._rows[number])
        ]

    def _put_of(self, kept: MutableMapping[Any, Any], key: Any) -> OffloadCopy:
        put = self._puts.get((id(kept), key))
        return put if put is not None and put.host is kept[key] else OffloadCopy(kept[key])

    def _go(self, row: Sequence[nn.Parameter]) -> list[OffloadCopy]:
        """Starts copying a bucket back into its host memory."""
        puts = []
        for kept, key in self._slots(row):
            value, before = kept[key], self._puts.get((id(kept), key))
            if before is not None and before.host is value:
                continue  # already on the host
            like = before is not None and before.host.dtype == value.dtype
            fits = before is not None and like and before.host.shape == value.shape
            put = self._host.put(value, before.host if before is not None and fits else None)
            self._puts[id(kept), key], kept[key] = put, put.host
            puts.append(put)
        return puts


@dataclass(frozen=True, eq=False)
class _Sized:
    parameter: nn.Parameter
    nbytes: int


def buckets(weights: Sequence[Weights], nbytes: int) -> list[list[nn.Parameter]]:
    """Returns the trained parameters of programs in buckets, by the largest part of any rank.

    Args:
        weights: weights of the programs.
        nbytes: bytes of parameters whose state is copied together, approximately.
    """
    sized = [
        _Sized(own, math.prod(w.storage.updated.local_shape(w.type.shape, each.comm.mesh))
               * own.element_size())
        for each in weights
        for w in each.all
        if isinstance(own := w.updated, nn.Parameter)
    ]  # fmt: skip
    return [[each.parameter for each in row] for row in rows(sized, nbytes)]


def _give(row: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(row, gradients, strict=True):
        parameter.grad = gradient

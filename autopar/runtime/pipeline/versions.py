"""Versions of the weights of a stage that is updated while microbatches are in flight.

A parameter is one tensor, whose newest values the optimizer changes in place. Before an update
overwrites values that are still needed, they are copied to a spare buffer; for an action on older
weights, the parameters temporarily hold that buffer. Autograd does not save a parameter for its
backward but looks it up at that time, so a backward runs on the weights that its row specifies:
those of its forward, or the newest ones if nothing is stashed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from autopar.errors import CheckpointError
from autopar.ir.pipeline_step import Adjustment
from autopar.runtime.parameters.shards import Weight, Weights
from autopar.runtime.pipeline.in_flight_state import Get, Put, get_all, put_all

VELOCITY = "velocity"  # in the optimizer's state of a parameter, for checkpoints


@dataclass(frozen=True)
class _Reference:
    """A reference to a view of a parameter, saved in place of its values."""

    held: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Slot:
    """A tensor that autograd saves, accessible to checkpoints."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True)
class _Forward:
    """A forward with a pending backward.

    Attributes:
        version: version of the weights that it used.
        slots: tensors that autograd saves for it, in order, if no older version is stored.
    """

    version: int
    slots: list[weakref.ref[_Slot]] = field(default_factory=list)


class Versions:
    """The versions of one stage's weights on this device.

    Args:
        weights: the stage's parameters.
        count: number of stored versions.
        stage: number of the stage.
        adjustment: correction for stale weights.

    Attributes:
        updates: number of updates since the stage last had no microbatch in flight.
        total: number of updates in the whole training.
    """

    def __init__(self, weights: Weights, count: int, stage: int, adjustment: Adjustment) -> None:
        self.updates = self.total = 0
        self._count, self._stage, self._adjustment = count, stage, adjustment
        self._trained: list[Weight] = [w for w in weights.all if w.updated.requires_grad]
        self._older: deque[list[Tensor]] = deque()  # from newer to older
        self._before: list[Tensor] = []
        self._forwards: dict[int, _Forward] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of stored versions besides the parameters themselves, without velocities."""
        return sum(tensor.nbytes for version in (*self._older, self._before) for tensor in version)

    @contextmanager
    def forward(self, age: int, microbatch: int) -> Iterator[None]:
        """Runs a forward on weights of an age in this context; autograd looks parameters up."""
        made = _Forward(self.updates - min(age, self.updates))
        if torch.is_grad_enabled():
            self._forwards[microbatch] = made
        with self._instead(self._of(age)), self._packing(made, lambda tensor: tensor):
            yield

    def _packing(self, made: _Forward, kept: Callable[[Tensor], Tensor]) -> saved_tensors_hooks:
        """Returns hooks that keep autograd from saving parameters, and pass others to `kept`."""
        held = {w.held.untyped_storage().data_ptr(): w.held for w in self._trained}
        held.pop(0, None)  # of parameters without elements

        def pack(tensor: Tensor) -> Tensor | _Reference | _Slot:
            known = held.get(tensor.untyped_storage().data_ptr())
            if known is not None and known.dtype == tensor.dtype:
                shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
                return _Reference(known, shape, tensor.stride(), offset)
            tensor = kept(tensor if known is None else tensor.clone())
            if self._count > 1:
                return tensor
            slot = _Slot(tensor)
            made.slots.append(weakref.ref(slot))
            return slot

        return saved_tensors_hooks(pack, _looked_up)

    @contextmanager
    def backward(self, age: int, microbatch: int, optimizer: Optimizer) -> Iterator[None]:
        """Runs a backward on weights of an age in this context, corrected if requested."""
        self._forwards.pop(microbatch, None)
        wanted = self._of(age)
        if self._adjustment.decay and self.total:
            delay = self._adjustment.delays[self._stage]
            values = [w.updated.detach() for w in self._trained]
            states = [optimizer.state[w.updated] for w in self._trained]
            wanted = [
                (value - delay * state[VELOCITY]).to(w.held.dtype) if VELOCITY in state else value
                for w, value, state in zip(self._trained, values, states, strict=True)
            ]
        with self._instead(wanted):
            yield

    def _of(self, age: int) -> Sequence[Tensor]:
        """Returns the weights of an age; () for the newest."""
        age = min(age, self.updates)
        return self._older[age - 1] if age else ()

    @contextmanager
    def _instead(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Replaces the values of the parameters in this context, unless `values` is empty."""
        newest = [weight.held.data for weight in self._trained] if values else []
        for weight, value in zip(self._trained, values, strict=False):
            weight.held.data = value
        try:
            yield
        finally:
            for weight, value in zip(self._trained, newest, strict=False):
                weight.held.data = value

    @contextmanager
    @torch.no_grad()
    def updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Lets the optimizer update the newest weights, at a rate adjusted to their delay."""
        self._keep()
        decays = self._adjustment.decay > 0
        if decays:
            self._before = _copied(self._before, [w.updated for w in self._trained])
        rate = self._adjustment.rate(self._stage, self.total)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * rate if rate != 1.0 else group["lr"]
        try:
            yield
        finally:
            for group, own in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = own
        if decays:
            self._follow(optimizer)
        self.updates += 1
        self.total += 1

    def _keep(self) -> None:
        """Copies the newest weights over the oldest stored version."""
        if self._count > 1:
            full = len(self._older) == self._count - 1
            spare = self._older.pop() if full else []
            self._older.appendleft(_copied(spare, [w.held for w in self._trained]))

    def _follow(self, optimizer: Optimizer) -> None:
        """Updates the velocities by the last change of the weights."""
        kept = self._adjustment.kept(self._stage)
        for weight, before in zip(self._trained, self._before, strict=True):
            state = optimizer.state[weight.updated]
            if VELOCITY not in state:
                state[VELOCITY] = torch.zeros_like(weight.updated)
            change = weight.updated.detach() - before
            state[VELOCITY].mul_(kept).add_(change, alpha=1 - kept)

    def restart(self) -> None:
        """Keeps only the newest weights, because no microbatch is in flight."""
        self.updates = 0
        self._older.clear()
        self._forwards.clear()

    # Checkpoints ---------------------------------------------------------------------------------

    def saved(self, put: Put) -> Any:
        """Returns the versions and the state of pending forwards; see `in_flight_state.py`."""
        return {
            "updates": self.updates,
            "total": self.total,
            "older": [put_all(version, put) for version in self._older],
            "forwards": {
                microbatch: [made.version, put_all(list(map(_tensor_of, made.slots)), put)]
                for microbatch, made in self._forwards.items()
            },
        }

    def resume(self, saved: Any, get: Get) -> None:
        """Restores the versions."""
        self.updates, self.total = saved["updates"], saved["total"]
        older = [[get(entry) for entry in version] for version in saved["older"]]
        for version in older:
            for weight, value in zip(self._trained, version, strict=True):
                if weight.held.shape != value.shape or weight.held.dtype != value.dtype:
                    raise CheckpointError(f"an older version of {weight.name} does not fit it")
        self._older = deque(older)

    @contextmanager
    def again(self, microbatch: int, saved: Any, get: Get) -> Iterator[None]:
        """Repeats the forward of a saved microbatch in this context, with its saved tensors."""
        version, entries = saved["forwards"][microbatch]
        age = self.updates - version
        if not 0 <= age < self._count:
            age = 0
        elif self._count > 1 and age > len(self._older):
            raise CheckpointError(f"version {version} of the weights is not in the checkpoint")
        left = iter(get_all(entries, get))

        def kept(tensor: Tensor) -> Tensor:
            was = next(left, None)
            if was is None:
                return tensor
            if was.shape != tensor.shape or was.dtype != tensor.dtype:
                raise CheckpointError(
                    f"stage {self._stage} left {list(was.shape)} of microbatch {microbatch} to its"
                    f" backward, and {list(tensor.shape)} when it ran again"
                )
            return was

        made = self._forwards[microbatch] = _Forward(version)
        with self._instead(self._of(age)), self._packing(made, kept):
            yield


def _tensor_of(slot: weakref.ref[_Slot]) -> Tensor | None:
    found = slot()
    return None if found is None else found.tensor


def _looked_up(kept: Tensor | _Reference | _Slot) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if isinstance(kept, _Slot):
        return kept.tensor
    return kept.held.detach().as_strided(kept.size, kept.stride, kept.offset)


def _copied(into: list[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of values, in the tensors of `into` if there are any."""
    if not into:
        return [value.detach().clone() for value in values]
    for target, value in zip(into, values, strict=True):
        target.copy_(value.detach())
    return into

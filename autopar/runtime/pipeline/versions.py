"""The weights of a stage that is updated while microbatches are under way.

A parameter is one tensor whose newest values the optimizer changes in place. Before an update that
would overwrite values which are still needed, they are copied into a spare buffer; an action on
older weights runs while the parameters hold that buffer. What autograd keeps of a parameter for its
backward is not kept but looked up then, so that a backward runs on the weights that its row says:
those that its forward saw, or, where nothing is stashed, the newest ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from autopar.ir.pipeline_step import Adjustment
from autopar.runtime.parameters.shards import Weight, Weights

VELOCITY = "velocity"  # in the optimizer's state of a parameter, so that checkpoints have it


@dataclass(frozen=True)
class _Reference:
    """A view of a parameter, in place of which nothing is kept."""

    held: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Versions:
    """The versions of one stage's weights on this device.

    Args:
        weights: its parameters.
        count: how many versions are held.
        stage: its number.
        adjustment: what makes up for stale weights.

    Attributes:
        updates: since the stage last had nothing under way.
        total: of the whole training.
    """

    def __init__(self, weights: Weights, count: int, stage: int, adjustment: Adjustment) -> None:
        self.updates = self.total = 0
        self._count, self._stage, self._adjustment = count, stage, adjustment
        self._trained: list[Weight] = [w for w in weights.all if w.updated.requires_grad]
        self._older: deque[list[Tensor]] = deque()  # the next older one first
        self._before: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what is held beside the parameters themselves, velocities left out."""
        return sum(tensor.nbytes for version in (*self._older, self._before) for tensor in version)

    @contextmanager
    def forward(self, age: int) -> Iterator[None]:
        """Inside, a forward runs on weights of this age, and autograd looks parameters up."""
        with self._instead(self._of(age)):
            held = {w.held.untyped_storage().data_ptr(): w.held for w in self._trained}
            held.pop(0, None)  # of parameters without elements

            def pack(tensor: Tensor) -> Tensor | _Reference:
                known = held.get(tensor.untyped_storage().data_ptr())
                if known is None:
                    return tensor
                if known.dtype != tensor.dtype:
                    return tensor.clone()
                shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
                return _Reference(known, shape, tensor.stride(), offset)

            with saved_tensors_hooks(pack, _looked_up):
                yield

    @contextmanager
    def backward(self, age: int, optimizer: Optimizer) -> Iterator[None]:
        """Inside, a backward runs on weights of this age, corrected if that is asked for."""
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
        """The weights of an age; () for the newest."""
        age = min(age, self.updates)
        return self._older[age - 1] if age else ()

    @contextmanager
    def _instead(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, parameters hold these values, if there are any."""
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
        """Inside, the optimizer updates the newest weights, at a rate that suits their delay."""
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
        """Copy the newest weights, in place of the oldest that are held."""
        if self._count > 1:
            full = len(self._older) == self._count - 1
            spare = self._older.pop() if full else []
            self._older.appendleft(_copied(spare, [w.held for w in self._trained]))

    def _follow(self, optimizer: Optimizer) -> None:
        """Let the velocities follow the change that was just made."""
        kept = self._adjustment.kept(self._stage)
        for weight, before in zip(self._trained, self._before, strict=True):
            state = optimizer.state[weight.updated]
            if VELOCITY not in state:
                state[VELOCITY] = torch.zeros_like(weight.updated)
            change = weight.updated.detach() - before
            state[VELOCITY].mul_(kept).add_(change, alpha=1 - kept)

    def restart(self) -> None:
        """Begin with the newest weights alone: nothing is under way."""
        self.updates = 0
        self._older.clear()


def _looked_up(kept: Tensor | _Reference) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.held.detach().as_strided(kept.size, kept.stride, kept.offset)


def _copied(into: list[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Values copied, into tensors that are there if there are any."""
    if not into:
        return [value.detach().clone() for value in values]
    for target, value in zip(into, values, strict=True):
        target.copy_(value.detach())
    return into

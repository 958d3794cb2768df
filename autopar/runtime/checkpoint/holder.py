"""Protocols of programs that checkpoints save and load."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.errors import CheckpointError, StateError
from autopar.runtime.calls.input_parts import Part as PartOfBatch
from autopar.runtime.checkpoint.contents import LocalTensor
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.values import decode, encode
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.update.update import Update


class Stateful(Protocol):
    """A learning-rate scheduler like those of torch, or a data loader like that of torchdata."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved state."""


class IndependentState(Protocol):
    """The additional state of replicas under local updates."""

    def saved(self, own: Sequence[Part]) -> list[Part]:
        """Returns the parts that this rank saves, given its replica's; all ranks call it."""

    def wanted(self, own: Sequence[Part], index: Index) -> list[Part]:
        """Returns the parts that this rank reads, given those of its replica's program."""

    def details(self) -> dict[str, Any]:
        """Returns values that are equal on all ranks."""

    def take(self, details: Any) -> None:
        """Continues from saved details, or starts from the beginning if none fit."""


class Holder(Protocol):
    """A program on this rank."""

    @property
    def update(self) -> Update:
        """The update of its parameters."""

    @property
    def watch(self) -> Watch:
        """Stops this rank if another fails."""

    @property
    def independent(self) -> IndependentState | None:
        """The state of independent replicas; None without any."""

    loaded: bool

    @property
    def part(self) -> PartOfBatch:
        """The part of a batch that this rank passes."""

    @property
    def held(self) -> Sequence[LocalTensor]:
        """Everything that this rank stores."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes of the state of all ranks, by name."""

    @property
    def streams(self) -> str:
        """A fingerprint of a program that has work under way between two steps, else ""."""

    def drain(self) -> None:
        """Completes the work in flight."""

    def under_way(self) -> tuple[Tensor, list[Tensor]] | None:
        """Returns the work in flight as a record of bytes and tensors; None if there is none."""

    def resume(self, record: Tensor, tensors: Sequence[Tensor]) -> None:
        """Continues the work that was in flight in a program with the same fingerprint."""

    def refresh(self) -> None:
        """Rounds stored parameters again from their masters."""


@torch.no_grad()
def fill(holder: Holder, constants: Mapping[str, Tensor], stored: Container[str]) -> None:
    """Sets buffers of a program without weights that no state_dict has and `stored` lacks.

    Raises:
        StateError: on every rank, if the model on the meta device has no values either.
    """
    if holder.loaded:
        return
    lacking = [
        name
        for name, value in constants.items()
        if value.is_meta and name in holder.shapes and f"buffer.{name}" not in stored
    ]
    if lacking:
        raise StateError(
            f"the program has no value of {', '.join(lacking)}",
            why="it is not in a state_dict, and a model on the meta device has no value of it",
            todo="make it persistent, or compile a model that has weights",
        )
    for h in holder.held:
        value = constants.get(h.name)
        if value is not None and not value.is_meta:
            h.tensor.copy_(value[h.box.slices])


def saved_loader(loader: Stateful | None, part: PartOfBatch) -> dict[str, Any] | None:
    """Returns the state of this rank's loader under the number of its part; None without one."""
    if loader is None:
        return None
    return {str(part.rank): encode(loader.state_dict(), "the loader")}


def loader_state(index: Index, part: PartOfBatch) -> dict[str, Any]:
    """Returns the saved state of the loader of a part.

    Raises:
        CheckpointError: on every rank, if there is none, or if batches had more or fewer parts.
    """
    states = index.details.get("loader")
    if not states:
        raise CheckpointError("the checkpoint has no loader", todo="save it with loader=...")
    if set(states) != set(map(str, range(part.world))):
        raise CheckpointError(
            "the checkpoint has the states of other loaders",
            why=f"it has one for each part of a batch: {len(states)} when it was saved, "
            f"{part.world} now",
            todo="load it without loader=, and begin the epoch again or skip what was read",
        )
    state: dict[str, Any] = decode(states[str(part.rank)])
    return state

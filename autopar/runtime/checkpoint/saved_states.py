"""The states that a checkpoint saves beside parameters and buffers.

    optimizer.NAME.KEY      state of the optimizer
    ema.NAME                averages of parameters
    residual.KEY...         residuals of compressed reductions
    under_way.RANK.N        work in flight of an asynchronous pipeline

Saving and loading iterate over the list of `states_of`; no other code depends on what a state is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from autopar.runtime.checkpoint.contents import LocalTensor, OptimizerState
from autopar.runtime.checkpoint.holder import Holder
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.residuals import Residuals
from autopar.runtime.checkpoint.saving import taking
from autopar.runtime.checkpoint.streams import WorkUnderWay
from autopar.runtime.checkpoint.values import decode, encode
from autopar.runtime.update.update import Update

_SCALE = "the scale of the loss"


class SavedState(Protocol):
    """A state of one kind on this rank, for one save or one load."""

    def saved(self) -> tuple[list[Part], dict[str, Any]]:
        """Returns this rank's tensors, and entries of the checkpoint's details."""

    def wanted(self, index: Index, matches: Mapping[str, str]) -> list[Part]:
        """Returns the destinations of this rank's tensors in a checkpoint; changes nothing else.

        Args:
            index: the checkpoint.
            matches: parameters and buffers of the program -> their names in the checkpoint.
        """

    def give(self) -> None:
        """Puts in place what has been read; begins again without it."""

    def restart(self) -> None:
        """Adapts to weights that were loaded without the state."""


class StepValues:
    """Values of the update that all ranks share: the number of steps, the scale of the loss.

    Args:
        update: the update.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        self._values: Mapping[str, Any] = {}

    def saved(self) -> tuple[list[Part], dict[str, Any]]:
        """Returns the values."""
        return [], {"update": encode(self._update.state_dict(), _SCALE)}

    def wanted(self, index: Index, matches: Mapping[str, str]) -> list[Part]:
        """Reads the values, which need no tensors.

        Raises:
            CheckpointError: there are others, or no numbers; nothing is changed yet.
        """
        values = decode(index.details.get("update", {}))
        with taking(_SCALE):
            self._values = {
                part: {key: _number(values[part][key], like) for key, like in own.items()}
                for part, own in self._update.state_dict().items()
                if part in values
            }
        return []

    def give(self) -> None:
        """Continues from the values."""
        self._update.load_state_dict(self._values)

    def restart(self) -> None:
        """Does nothing: steps count on."""


def _number(value: Any, like: float) -> float:
    """Returns a number of the type of another, if a device can hold it."""
    number = type(like)(value)
    torch.tensor(number)  # raises an error for integers of more than 64 bits
    return number


class Averages:
    """Averages of the parameters.

    Args:
        update: the update that keeps them.
        held: the parameters of this rank.
    """

    def __init__(self, update: Update, held: Sequence[LocalTensor]) -> None:
        self._update = update
        self._held = [h for h in held if h.average is not None]
        self._read: set[int] = set()  # ids of updated tensors whose average was read

    def saved(self) -> tuple[list[Part], dict[str, Any]]:
        """Returns the averages, which are split as the updated parameters are."""
        return [self._part(h, h.name) for h in self._held if h.first], {}

    def wanted(self, index: Index, matches: Mapping[str, str]) -> list[Part]:
        """Returns the averages that the checkpoint has too."""
        there = [h for h in self._held if f"ema.{matches[h.name]}" in index.tensors]
        self._read = {id(h.updated) for h in there}
        return [self._part(h, matches[h.name]) for h in there]

    def give(self) -> None:
        """Begins averages that were not read with the parameters that were."""
        self._update.restart(self._read)

    def restart(self) -> None:
        """Begins all averages with the new parameters."""
        self._update.restart()

    def _part(self, h: LocalTensor, name: str) -> Part:
        assert h.average is not None
        return Part(f"ema.{name}", h.average, h.updated_box, h.shape)


def states_of(holder: Holder) -> tuple[SavedState, ...]:
    """Returns all states of a program on this rank, in the order in which they are saved.

    They are restored from the last to the first. All ranks together save the work in flight, so it
    comes before states that may fail on one rank.
    """
    update, held = holder.update, holder.held
    return (
        WorkUnderWay(holder),
        Averages(update, held),  # the last to be restored of what may belong in host memory
        Residuals(held),
        OptimizerState(update.optimizer, held),
        StepValues(update),
    )

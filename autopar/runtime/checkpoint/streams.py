"""Work in flight between two steps of an asynchronous pipeline, as tensors of a checkpoint.

Every rank saves its own under its number. Only a program of the same stages, devices and schedule
can take it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.holder import Holder
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.saving import taking
from autopar.runtime.checkpoint.values import DTYPES
from autopar.runtime.ranks.shared import Peers

_RECORD = "record"


class WorkUnderWay:
    """The work in flight on this rank; see `SavedState`.

    Args:
        holder: the program.
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._parts: list[Part] = []

    def saved(self) -> tuple[list[Part], dict[str, Any]]:
        """Returns a record and tensors, and the program's fingerprint; "" if nothing is in flight.

        All ranks call it.
        """
        found = self._holder.under_way()
        if found is None:
            return [], {"under_way": ""}
        record, tensors = found
        named = [(_RECORD, record), *((str(number), one) for number, one in enumerate(tensors))]
        return [_part(*pair) for pair in named], {"under_way": self._holder.streams}

    def wanted(self, index: Index, matches: Mapping[str, str]) -> list[Part]:
        """Returns the destinations of this rank's record and tensors, in that order.

        [] where the checkpoint has none. Warns where it has some that this program cannot take.

        Raises:
            CheckpointError: this rank's are not there.
        """
        streams = index.details.get("under_way")
        if not streams:
            return []
        if streams != self._holder.streams:
            warnings.warn(
                "the checkpoint was saved while microbatches of an asynchronous pipeline were under"
                " way; this program has other stages, devices or another schedule, so it continues"
                " with the newest weights and without those microbatches",
                stacklevel=2,
            )
            return []
        stored = index.under(f"under_way.{Peers.here().rank}")
        numbers = sorted((name for name in stored if name.isdecimal()), key=int)
        if _RECORD not in stored or list(map(int, numbers)) != list(range(len(numbers))):
            raise CheckpointError("the checkpoint lacks what was under way on this rank")
        device = next((held.tensor.device for held in self._holder.held), torch.device("cpu"))
        self._parts = [
            _part(name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device))
            for name, entry in ((name, stored[name]) for name in (_RECORD, *numbers))
        ]
        return self._parts

    def give(self) -> None:
        """Continues the work that was read, if there is any."""
        if self._parts:
            record, *tensors = (part.tensor for part in self._parts)
            with taking("what was under way"):
                self._holder.resume(record.cpu(), tensors)

    def restart(self) -> None:
        """Does nothing: the pipeline was drained before other weights were loaded."""


def _part(name: str, tensor: torch.Tensor) -> Part:
    shape = tuple(tensor.shape)
    return Part(f"under_way.{Peers.here().rank}.{name}", tensor, Box.whole(shape), shape)

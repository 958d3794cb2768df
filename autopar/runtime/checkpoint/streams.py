"""Work in flight between two steps of an asynchronous pipeline, as tensors of a checkpoint.

Every rank saves its own under its number. Only a program of the same stages, devices and schedule
can take it.
"""

from __future__ import annotations

import warnings

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.holder import Holder
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.values import DTYPES
from autopar.runtime.ranks.shared import Peers

_RECORD = "record"


def parts_under_way(holder: Holder) -> tuple[list[Part], str]:
    """Returns the work in flight on this rank, and its program's fingerprint; "" for none.

    All ranks call it.
    """
    found = holder.under_way()
    if found is None:
        return [], ""
    record, tensors = found
    named = [(_RECORD, record), *((str(number), tensor) for number, tensor in enumerate(tensors))]
    return [_part(name, tensor) for name, tensor in named], holder.streams


def room_for_parts(holder: Holder, index: Index) -> list[Part]:
    """Returns the destinations of this rank's record and tensors, in that order.

    [] where the checkpoint has none. Warns where it has some that this program cannot take.

    Raises:
        CheckpointError: this rank's are not there.
    """
    streams = index.details.get("under_way")
    if not streams:
        return []
    if streams != holder.streams:
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
    device = next((held.tensor.device for held in holder.held), torch.device("cpu"))
    return [
        _part(name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device))
        for name, entry in ((name, stored[name]) for name in (_RECORD, *numbers))
    ]


def _part(name: str, tensor: torch.Tensor) -> Part:
    shape = tuple(tensor.shape)
    return Part(f"under_way.{Peers.here().rank}.{name}", tensor, Box.whole(shape), shape)

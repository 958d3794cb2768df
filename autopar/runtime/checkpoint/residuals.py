"""Residuals of compressed reductions, which pass from step to step, in a checkpoint.

Every device has its own residual. The residuals of a parameter of shape (a, b) are saved as one
tensor (devices, a, b). A program on the same mesh with the same reductions resumes bit for bit. In
any other program, the devices divide the sum of all residuals equally, and low-rank factors begin
again. A fused parameter that is cut differently begins without a residual.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ir.storage import REDUCED, Hop
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.contents import LocalTensor
from autopar.runtime.checkpoint.index import Index, Stored
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.values import DTYPES
from autopar.runtime.communication.compressed import Memory
from autopar.runtime.parameters.shards import Weight


class _Holder(NamedTuple):
    """A parameter that this rank holds, and the name of its kept tensors.

    Attributes:
        held: the parameter.
        weight: the same, with its collectives and what is kept of it.
        name: unlike that of another stage which holds the parameter.
    """

    held: LocalTensor
    weight: Weight
    name: str

    @property
    def memory(self) -> Memory:
        """Part of it that is kept."""
        return self.weight.memory

    @property
    def slots(self) -> dict[str, Hop]:
        """The reductions that leave a residual, by the names of these."""
        return {
            f"{when}{place}": hop
            for when in REDUCED
            for place, hop in enumerate(self.weight.path(when))
            if hop.residual
        }

    def rows(self, hop: Hop) -> int:
        """Returns how many devices have a residual of the same elements."""
        return math.prod(self.held.state.comm.mesh.axis_size(axis) for axis in self._over(hop))

    def box(self, hop: Hop) -> Box:
        """Returns the place of this rank's residual among those of all devices."""
        comm = self.held.state.comm
        row = 0
        for axis in self._over(hop):
            row = row * comm.mesh.axis_size(axis) + comm.coordinate[axis]
        bounds = hop.src.bounds(self.held.parameter.shape, comm.mesh, comm.coordinate)
        return Box((row, *(start for start, _ in bounds)), (1, *(length for _, length in bounds)))

    def shape(self, hop: Hop) -> tuple[int, ...]:
        """Returns the shape of the residuals of all devices."""
        return (self.rows(hop), *self.held.parameter.shape)

    def _over(self, hop: Hop) -> list[str]:
        split = {axis for axes in hop.src.dims for axis in axes}
        return [axis for axis in self.held.state.comm.mesh.names if axis not in split]


def _holders(held: Sequence[LocalTensor]) -> Iterator[_Holder]:
    """Yields the parameters with compressed reductions; two stages may hold one of them."""
    seen: Counter[str] = Counter()
    for h in held:
        first = f"residual.{h.parameter.key}.{h.state.comm.ranks[0]}"
        if h.weight is not None:
            yield _Holder(h, h.weight, f"{first}.{seen[first]}")
            seen[first] += 1


class Residuals:
    """Residuals of compressed reductions on this rank; see `SavedState`.

    Args:
        held: the parameters of this rank.
    """

    def __init__(self, held: Sequence[LocalTensor]) -> None:
        self._held = held
        self._parts: list[Part] = []
        self._kept: list[tuple[Memory, str, list[Tensor], int]] = []

    def saved(self) -> tuple[list[Part], dict[str, Any]]:
        """Returns the tensors that compressed reductions keep."""
        parts = []
        for holder in _holders(self._held):
            slots = holder.slots
            for slot, tensor in holder.memory.items():
                name, own = f"{holder.name}.{slot}", tuple(tensor.shape)
                if hop := slots.get(slot):
                    rows = tensor.unsqueeze(0)
                    parts.append(Part(name, rows, holder.box(hop), holder.shape(hop)))
                else:
                    name = f"{name}.{holder.held.state.comm.rank}"
                    parts.append(Part(name, tensor, Box.whole(own), own))
        return parts, {}

    def wanted(self, index: Index, matches: Mapping[str, str]) -> list[Part]:
        """Returns the destinations of what the checkpoint has of them."""
        for holder in _holders(self._held):
            stored = {
                name: entry
                for name, entry in index.tensors.items()
                if name.startswith(f"residual.{holder.held.parameter.key}.")
            }
            slots = holder.slots
            wanted = {f"{holder.name}.{slot}": holder.shape(hop) for slot, hop in slots.items()}
            known = {name: entry.shape for name, entry in stored.items() if not _of_one(name)}
            same = slots and wanted == {n: known[n] for n in known if n.startswith(holder.name)}
            if same:
                self._go_on(holder, stored)
            elif slots and holder.held.first and holder.name.endswith(".0"):
                self._divide(holder, stored)
        return self._parts

    def _go_on(self, holder: _Holder, stored: dict[str, Stored]) -> None:
        for slot, hop in holder.slots.items():
            name = f"{holder.name}.{slot}"
            room = self._room(name, stored[name], holder.box(hop), holder)
            self._kept.append((holder.memory, slot, [room], 1))
        end = f".{holder.held.state.comm.rank}"
        for name, entry in stored.items():
            slot = name.removeprefix(f"{holder.name}.").removesuffix(end)
            if name == f"{holder.name}.{slot}{end}":
                room = self._room(name, entry, Box.whole(entry.shape), holder)
                self._kept.append((holder.memory, slot, [room.unsqueeze(0)], 1))

    def _divide(self, holder: _Holder, stored: dict[str, Stored]) -> None:
        """Takes this rank's part of the sum of everything that is owed, divided by the devices."""
        slot, hop = next(iter(holder.slots.items()))
        box, shape = holder.box(hop), holder.held.parameter.shape
        rooms = []
        for name, entry in stored.items():
            if entry.shape[1:] == shape and not _of_one(name):
                rows = Box((0, *box.offsets[1:]), (entry.shape[0], *box.sizes[1:]))
                rooms.append(self._room(name, entry, rows, holder))
        if rooms:
            self._kept.append((holder.memory, slot, rooms, holder.rows(hop)))

    def _room(self, name: str, entry: Stored, box: Box, holder: _Holder) -> Tensor:
        device = holder.held.tensor.device
        tensor = torch.empty(box.sizes, dtype=DTYPES[entry.dtype], device=device)
        self._parts.append(Part(name, tensor, box, entry.shape))
        return tensor

    def give(self) -> None:
        """Replaces the kept tensors by those that were read."""
        self.restart()
        for memory, slot, rooms, devices in self._kept:
            total = torch.stack([room.sum(0) for room in rooms]).sum(0)
            memory[slot] = total / devices if devices > 1 else total

    def restart(self) -> None:
        """Drops the kept tensors, which belong to other weights."""
        for h in self._held:
            if h.weight is not None:
                h.weight.memory.clear()


def _of_one(name: str) -> bool:
    """Returns whether a tensor belongs to one device, whose number its name ends with."""
    return name.rpartition(".")[2].isdigit()

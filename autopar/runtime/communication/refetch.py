"""Parameters that are gathered again for the backward instead of being kept in their used layout.

For such a tensor autograd saves the kept part of the parameter instead: nothing if it is stored in
shards anyway (FSDP's "reshard after forward", arXiv:2304.11277, section 3.2), or a second copy in
every group of devices in ZeRO++ (arXiv:2306.10209). When the backward needs the first parameter of
a block, the block's kept parts are gathered together; each is dropped after its last use. On
accelerators the previous block's are on their way meanwhile; on the CPU that would gain little, and
would raise the peak of memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.ir.storage import Storage
from autopar.runtime import torch_private
from autopar.runtime.communication.fetch import block_rows
from autopar.runtime.parameters.shards import Weight, depart, travel

if TYPE_CHECKING:
    from autopar.runtime.communication.communicator import Groups


class _Kept:
    """The kept part of one parameter between a forward and its backward.

    Attributes:
        weight: the parameter.
        part: its kept part.
        saved: whether autograd saved it for some operator.
        arrived: the parameter as operators use it, until the first of them takes it.
    """

    def __init__(self, comm: Groups, weight: Weight, used: Tensor, block: _Block) -> None:
        self._comm, self.weight, self._block = comm, weight, block
        self.part = part_of(comm, weight.storage, weight.held, used)
        self.saved = False
        self.arrived: Tensor | None = None
        self._again: Callable[[], Tensor | None] = lambda: None

    def fetch(self) -> Tensor:
        """Returns the parameter as operators use it, gathering it unless it still is."""
        self._block.arrive()
        gathered = self._again() if self.arrived is None else self.arrived
        self.arrived = None
        if gathered is None:
            gathered = travel(self._comm, [self.weight], [self.part], "backward")[0]
        self._again = weakref.ref(gathered)
        return gathered


class _Block:
    """The kept parts of one block's parameters in one forward.

    Args:
        comm: the mesh.
        bucket: bytes that are gathered together, approximately.
        before: the previous block, whose backward comes next, if it is prefetched.
    """

    def __init__(self, comm: Groups, bucket: int, before: _Block | None) -> None:
        self._comm, self._bucket = comm, bucket
        self._before = None if before is None else weakref.ref(before)
        self.kept: dict[Weight, weakref.ref[_Kept]] = {}
        self._coming: list[tuple[list[_Kept], Callable[[], list[Tensor]]]] | None = None
        self._arrived = False

    def depart(self, ahead: bool) -> None:
        """Starts gathering the parts that autograd saved."""
        if self._coming is not None:
            return
        self._coming = []
        there = (ref() for ref in self.kept.values())
        saved = {kept.weight: kept for kept in there if kept is not None and kept.saved}
        for row in block_rows(saved, "backward", self._bucket, self._comm.mesh):
            members = [saved[weight] for weight in row.weights]
            parts = [kept.part for kept in members]
            coming = depart(self._comm, row.weights, parts, "backward", ahead)
            self._coming.append((members, coming))

    def arrive(self) -> None:
        """Gathers them, once; the previous block's start to arrive."""
        if self._arrived:
            return
        self._arrived = True
        self.depart(False)
        for members, arrive in self._coming or ():
            for kept, tensor in zip(members, arrive(), strict=True):
                kept.arrived = tensor
        self._coming = []
        before = None if self._before is None else self._before()
        if before is not None:
            before.depart(True)


def part_of(comm: Groups, storage: Storage, held: Tensor, used: Tensor) -> Tensor:
    """Returns the kept part of a parameter, given its stored and its used tensor."""
    if storage.kept.dims == storage.held.dims:
        return held.detach()
    part = used.detach()
    for dim, (fine, coarse) in enumerate(zip(storage.kept.dims, storage.used.dims, strict=True)):
        if fine != coarse:
            part = part.narrow(dim, *comm.group(fine[len(coarse) :]).own(int(part.shape[dim])))
    return part.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _View:
    """A saved tensor: a view of a parameter."""

    kept: _Kept
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Refetch:
    """Replaces parameters among autograd's saved tensors.

    Args:
        comm: the mesh.
        ahead: whether the next block is prefetched while a block's backward computes.
    """

    def __init__(self, comm: Groups, ahead: bool) -> None:
        self._comm, self._ahead = comm, ahead
        self._bucket = 1
        self._block: _Block | None = None
        self._name = ""
        self._known: dict[int, tuple[Any, _Kept]] = {}

    def watch(self, weight: Weight, used: Tensor) -> None:
        """Registers a gathered parameter, of which only the kept part is saved."""
        block = self._block
        if block is None or self._name != weight.block or weight in block.kept:
            block = _Block(self._comm, self._bucket, block if self._ahead else None)
            self._block, self._name = block, weight.block
        kept = _Kept(self._comm, weight, used, block)
        block.kept[weight] = weakref.ref(kept)
        key = torch_private.storage_id(used)
        gone = weakref.ref(used.untyped_storage(), lambda _: self._known.pop(key, None))
        self._known[key] = (gone, kept)

    @contextmanager
    def instead(self, bucket: int) -> Iterator[None]:
        """Returns a context in which autograd saves kept parts in place of such parameters.

        Args:
            bucket: bytes that are gathered together, approximately.
        """
        self._bucket, self._block = bucket, None
        with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
            yield

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Returns the object that autograd saves: the tensor, unless it belongs to a parameter."""
        known = self._known.get(torch_private.storage_id(tensor))
        if known is None:
            return tensor
        known[1].saved = True
        return _View(known[1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def unpack(saved: Tensor | _View) -> Tensor:
    """Returns the tensor that was saved as `saved`."""
    if isinstance(saved, Tensor):
        return saved
    return saved.kept.fetch().as_strided(saved.size, saved.stride, saved.offset)

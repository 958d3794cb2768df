"""Parameters that are not kept for the backward as operators use them, but gathered again for it.

What autograd saves of such a tensor is replaced by what is kept of the parameter, which is nothing
where it is held in parts anyway (FSDP's "reshard after forward", arXiv:2304.11277, section 3.2) and
a second copy in every group of devices in ZeRO++ (arXiv:2306.10209). When a backward asks for it,
it is gathered, and forgotten when nobody needs it any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.codegen import torch_private
from autopar.codegen.weights import Weight, travel
from autopar.ir.storage import Storage

if TYPE_CHECKING:
    from autopar.codegen.collectives import Groups


class _Kept:
    """What is kept of one parameter between a forward and its backward."""

    def __init__(self, comm: Groups, weight: Weight, used: Tensor) -> None:
        self._comm, self._weight = comm, weight
        self._part = part_of(comm, weight.storage, weight.held, used)
        self._again: Callable[[], Tensor | None] = lambda: None

    def fetch(self) -> Tensor:
        """The parameter as operators use it, gathered unless it still is."""
        found = self._again()
        if found is None:
            found = travel(self._comm, [self._weight], [self._part], "backward")[0]
            self._again = weakref.ref(found)
        return found


def part_of(comm: Groups, storage: Storage, held: Tensor, used: Tensor) -> Tensor:
    """What is kept of a parameter, given what is held and what is used of it."""
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
    """The tensors of parameters that autograd does not keep.

    Args:
        comm: the mesh.
    """

    def __init__(self, comm: Groups) -> None:
        self._comm = comm
        self._known: dict[int, tuple[Any, _Kept]] = {}

    def watch(self, weight: Weight, used: Tensor) -> None:
        """Keep nothing but its part of a parameter that has been gathered."""
        key = torch_private.storage_id(used)
        gone = weakref.ref(used.untyped_storage(), lambda _: self._known.pop(key, None))
        self._known[key] = (gone, _Kept(self._comm, weight, used))

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, autograd saves parts of such parameters in their place."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        known = self._known.get(torch_private.storage_id(tensor))
        if known is None:
            return tensor
        return _View(known[1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Tensor | _View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.kept.fetch().as_strided(saved.size, saved.stride, saved.offset)

"""Keeps blocks' saved tensors in host memory between forward and backward.

with mesh.stowed():
    hidden = h_block(mesh, p, i, hidden)

Autograd's saved tensors are copied storage by storage, each once; parameters and the batch stay on
the device. When the backward needs the first tensor of a block, all tensors of the block return. On
accelerators, copies overlap with computation: a block is copied to the host while the next block
computes, and back while the backward computes the block after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import torch_private
from autopar.runtime.offload.host_streams import Host, OffloadCopy, ReloadCopy


class _OffloadedStorage:
    """One storage in host memory.

    Attributes:
        put: its copy in host memory.
        back: its bytes on the device, once requested.
    """

    def __init__(self, put: OffloadCopy) -> None:
        self.put = put
        self.back: ReloadCopy | None = None


class _Block:
    """The offloaded tensors of one block.

    Args:
        host: the host.
        before: the previous block, whose backward comes next.
    """

    def __init__(self, host: Host, before: _Block | None) -> None:
        self._host = host
        self._before = None if before is None else weakref.ref(before)
        self._coming: list[ReloadCopy] = []
        # Including the storages of earlier blocks.
        self.stowed: dict[weakref.ref[_OffloadedStorage], None] = {}

    def _alive(self) -> Iterator[_OffloadedStorage]:
        return (stowed for ref in self.stowed if (stowed := ref()) is not None)

    def depart(self) -> None:
        """Starts copying back the storages that are still needed."""
        for stowed in self._alive():
            if stowed.back is None:
                stowed.back = self._host.take(stowed.put)
                self._coming.append(stowed.back)

    def come(self) -> None:
        """Brings it back; the previous block starts to return during the next computation."""
        self.depart()
        self.arrived()
        before = None if self._before is None else self._before()
        self._before = None
        if before is not None and self._host.overlaps:
            before.depart()

    def arrived(self) -> None:
        """Waits for the copies; until then their memory must not be reused."""
        for taken in self._coming:
            taken.wait()
        self._coming.clear()

    def went(self) -> None:
        """Waits until it is in host memory."""
        for stowed in self._alive():
            self._host.gone(stowed.put)


@dataclass(frozen=True)
class _View:
    """A saved tensor of a block: a view of a storage in host memory."""

    stowed: _OffloadedStorage
    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensorOffload:
    """The offloaded saved tensors of one program's blocks.

    Args:
        device: device of the program.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._inside = device, False
        self._staying: set[int] = set()
        self._known: dict[int, tuple[Any, weakref.ref[_OffloadedStorage]]] = {}
        self._blocks: list[_Block] = []

    @cached_property
    def _host(self) -> Host:
        return Host(self._device)

    @contextmanager
    def forward(self, staying: Iterable[Tensor]) -> Iterator[None]:
        """Returns the context of a forward during which these tensors stay on the device."""
        for block in self._blocks:
            block.arrived()
        self._known.clear()
        self._blocks.clear()
        self._staying = {torch_private.storage_id(tensor) for tensor in staying}
        yield
        if self._blocks:
            self._blocks[-1].went()

    def leave(self, tensor: Tensor) -> None:
        """Adds a tensor that stays: a gathered parameter."""
        if not self._inside:
            return
        key = torch_private.storage_id(tensor)
        self._staying.add(key)
        weakref.finalize(tensor.untyped_storage(), self._staying.discard, key)

    @contextmanager
    def block(
        self, packed: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> Iterator[None]:
        """Returns the context of a block whose saved tensors are offloaded.

        Args:
            packed: maps a tensor to the object saved in its place; by default the tensor itself.
            unpack: the inverse of `packed`.
        """
        before = self._blocks[-1] if self._blocks else None
        self._blocks.append(_Block(self._host, before))
        self._inside = True

        def pack(tensor: Tensor) -> Any:
            replacement = packed(tensor)
            return self._stowed(tensor) if replacement is tensor else replacement

        def bring(saved: Any) -> Tensor:
            return _viewed(saved) if isinstance(saved, _View) else unpack(saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, bring):
            try:
                yield
            finally:
                self._inside = False
        if before is not None:
            before.went()

    def _stowed(self, tensor: Tensor) -> Tensor | _View:
        storage, key = tensor.untyped_storage(), torch_private.storage_id(tensor)
        plain = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        if key in self._staying or not storage.nbytes() or not plain:
            return tensor
        _, known = self._known.get(key, (None, lambda: None))
        stowed = known()
        if stowed is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            stowed = _OffloadedStorage(self._host.put(whole))
            gone = weakref.ref(storage, lambda _: self._known.pop(key, None))
            self._known[key] = (gone, weakref.ref(stowed))
        block, place = self._blocks[-1], int(tensor.storage_offset())
        block.stowed[weakref.ref(stowed)] = None
        return _View(stowed, block, tensor.dtype, tensor.size(), tensor.stride(), place)


def _viewed(saved: _View) -> Tensor:
    saved.block.come()
    assert saved.stowed.back is not None
    storage = saved.stowed.back.wait().untyped_storage()
    view = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return view.set_(storage, saved.offset, saved.size, saved.stride)

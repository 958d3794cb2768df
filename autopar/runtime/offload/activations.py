"""What blocks keep for their backward lies in host memory between their forward and that.

with mesh.stowed():
    hidden = h_block(mesh, p, i, hidden)

Autograd's saved tensors go there storage by storage, each once; parameters and the batch stay where
they are. When the backward asks for the first of a block all of the block come back. On
accelerators copies run beside what is computed: a block goes while the next one is computed, and
comes back while the backward computes the one behind it.
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
from autopar.runtime.offload.host_streams import Host, Put, Taken


class _Stowed:
    """One storage in host memory.

    Attributes:
        put: its bytes there.
        back: its bytes on the device, once they have been asked for.
    """

    def __init__(self, put: Put) -> None:
        self.put = put
        self.back: Taken | None = None


class _Block:
    """What one block stows.

    Args:
        host: where it lies.
        before: the block before it, which the backward reaches next.
    """

    def __init__(self, host: Host, before: _Block | None) -> None:
        self._host = host
        self._before = None if before is None else weakref.ref(before)
        self._coming: list[Taken] = []
        self.stowed: dict[weakref.ref[_Stowed], None] = {}  # also what others stowed before

    def _alive(self) -> Iterator[_Stowed]:
        return (found for ref in self.stowed if (found := ref()) is not None)

    def depart(self) -> None:
        """Begin to bring back what somebody still needs."""
        for stowed in self._alive():
            if stowed.back is None:
                stowed.back = self._host.take(stowed.put)
                self._coming.append(stowed.back)

    def come(self) -> None:
        """Bring it back; the block before begins to come beside what is computed next."""
        self.depart()
        self.arrived()
        before = None if self._before is None else self._before()
        self._before = None
        if before is not None and self._host.beside:
            before.depart()

    def arrived(self) -> None:
        """Wait for what comes; until then its memory is nobody else's."""
        for taken in self._coming:
            taken.wait()
        self._coming.clear()

    def went(self) -> None:
        """Wait until it is in host memory."""
        for stowed in self._alive():
            self._host.gone(stowed.put)


@dataclass(frozen=True)
class _View:
    """A tensor that was saved in a block: a view of a storage in host memory."""

    stowed: _Stowed
    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Stow:
    """The saved tensors of the blocks of one program that are not kept on the device.

    Args:
        device: where the program runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._inside = device, False
        self._staying: set[int] = set()
        self._known: dict[int, tuple[Any, weakref.ref[_Stowed]]] = {}
        self._blocks: list[_Block] = []

    @cached_property
    def _host(self) -> Host:
        return Host(self._device)

    @contextmanager
    def forward(self, staying: Iterable[Tensor]) -> Iterator[None]:
        """Inside is a forward, of which these tensors stay on the device."""
        for block in self._blocks:
            block.arrived()
        self._known.clear()
        self._blocks.clear()
        self._staying = {torch_private.storage_id(tensor) for tensor in staying}
        yield
        if self._blocks:
            self._blocks[-1].went()

    def leave(self, tensor: Tensor) -> None:
        """One more that stays: a parameter that was gathered."""
        if not self._inside:
            return
        key = torch_private.storage_id(tensor)
        self._staying.add(key)
        weakref.finalize(tensor.untyped_storage(), self._staying.discard, key)

    @contextmanager
    def block(
        self, packed: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> Iterator[None]:
        """Inside a block is computed whose saved tensors are stowed.

        Args:
            packed: what else may be saved in a tensor's place; the tensor itself if nothing.
            unpack: gives the tensor for that.
        """
        before = self._blocks[-1] if self._blocks else None
        self._blocks.append(_Block(self._host, before))
        self._inside = True

        def pack(tensor: Tensor) -> Any:
            found = packed(tensor)
            return self._stowed(tensor) if found is tensor else found

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
            stowed = _Stowed(self._host.put(whole))
            gone = weakref.ref(storage, lambda _: self._known.pop(key, None))
            self._known[key] = (gone, weakref.ref(stowed))
        block, place = self._blocks[-1], int(tensor.storage_offset())
        block.stowed[weakref.ref(stowed)] = None
        return _View(stowed, block, tensor.dtype, tensor.size(), tensor.stride(), place)


def _viewed(saved: _View) -> Tensor:
    saved.block.come()
    assert saved.stowed.back is not None
    storage = saved.stowed.back.wait().untyped_storage()
    made = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return made.set_(storage, saved.offset, saved.size, saved.stride)

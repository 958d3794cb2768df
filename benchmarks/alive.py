"""Measures the bytes of live tensors, from the allocation of every storage until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts storages inside a context, from the operator that allocates them until they are freed.

    The profiler's allocation count would not do: it misses storages whose last holder frees them on
    one of gloo's threads. Resized storages count with their current size (FSDP empties them).

    Args:
        known: tensors that count from the beginning.
        read: whether tensors count from the first operator that reads them, whatever allocated
            them.

    Attributes:
        curve: (operator, live bytes after it) for every operator.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, read: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read
        self.curve: list[tuple[str, int]] = []
        self._held: dict[int, weakref.ref[UntypedStorage]] = {}
        for tensor in known:
            self.count(tensor)

    @property
    def live(self) -> int:
        """Bytes that are alive now."""
        there = (ref() for ref in list(self._held.values()))
        return sum(storage.nbytes() for storage in there if storage is not None)

    def count(self, tensor: Tensor) -> None:
        """One more, unless it has no memory of its own."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key not in self._held and storage.data_ptr():
            self._held[key] = weakref.ref(storage, lambda _: self._held.pop(key, None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Returns the operator's result, and counts the live bytes."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result) if self._read else result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        self.curve.append((str(func), self.live))
        return result

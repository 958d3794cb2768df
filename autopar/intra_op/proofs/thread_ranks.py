"""Devices of a mesh as threads of one process, for proofs of operators that communicate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, blocks
from autopar.operators.sharded_operators import Axes, ShardedOperators

Value = TypeVar("Value")
_PATIENCE = 60.0  # seconds after which a waiting thread fails


class _Table:
    """A rendezvous where the devices of one group exchange values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size

    def swap(self, index: int, value: Any) -> list[Any]:
        """Returns the values of all devices, once each has supplied one."""
        self.values[index] = value
        self.barrier.wait(_PATIENCE)
        values = list(self.values)
        self.barrier.wait(_PATIENCE)
        return values


@dataclass(frozen=True)
class _ThreadPeers:
    """Implements `autopar.operators.peer_devices.Peers`; `index` is this device's block."""

    mesh: Mesh
    axes: tuple[str, ...]
    coordinate: dict[str, int]
    index: int
    size: int
    table: _Table

    def own(self, extent: int) -> tuple[int, int]:
        (bounds,) = Layout((self.axes,)).bounds((extent,), self.mesh, self.coordinate)
        return bounds

    def reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.table.swap(self.index, x.detach().clone())).sum(0).to(x.dtype)

    def maximum(self, x: Tensor) -> Tensor:
        return torch.stack(self.table.swap(self.index, x.detach().clone())).amax(0)

    def stack(self, x: Tensor) -> Callable[[], Tensor]:
        stacked = torch.stack(self.table.swap(self.index, x.detach().clone()))
        return lambda: stacked

    def blocks(self, extent: int) -> list[tuple[int, int]]:
        return blocks(tuple(map(self.mesh.axis_size, self.axes)), extent)

    def order_of_blocks(self) -> Sequence[int]:
        return range(self.size)

    def deal(
        self, sent: Sequence[Sequence[Tensor]], takes: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        nothing = next(x for pieces in sent for x in pieces).new_empty(0)
        rows = [torch.cat([nothing, *(x.detach().reshape(-1) for x in row)]) for row in sent]
        taken = [pieces[self.index] for pieces in self.table.swap(self.index, rows)]
        taken[self.index] = nothing
        awaited = [0 if at == self.index else count for at, count in enumerate(takes)]
        if [x.numel() for x in taken] != awaited:
            raise ValueError(f"{awaited} elements are awaited, {[x.numel() for x in taken]} come")
        arrived = torch.cat(taken).split(awaited)  # in one buffer, as between processes
        return lambda: list(arrived)

    def sum_parts(self, x: Tensor) -> Tensor:
        return torch.stack([y[self.index] for y in self.table.swap(self.index, x.clone())]).sum(0)

    def neighbours(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor | None]:
        sent = self.table.swap(self.index, (before.detach().clone(), after.detach().clone()))
        head = sent[self.index - 1][1] if self.index else None
        return head, sent[self.index + 1][0] if self.index + 1 < self.size else None

    def swap(self, x: Tensor) -> Tensor:
        sent = self.table.swap(self.index, x.detach().clone())
        return torch.stack([other[self.index] for other in sent])

    def rows(self, x: Tensor, sends: Sequence[int], takes: Sequence[int]) -> Tensor:
        sent = self.table.swap(self.index, x.detach().clone().split(list(sends)))
        return torch.cat([other[self.index] for other in sent])


@dataclass
class _Rendezvous:
    """The rendezvous tables of all groups of a mesh, created on first use."""

    mesh: Mesh
    tables: dict[tuple[Any, ...], _Table] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def table(self, key: tuple[Any, ...], size: int) -> _Table:
        with self.lock:
            return self.tables.setdefault(key, _Table(size))

    def leave(self) -> None:
        """Wakes the threads that wait for a failed one."""
        with self.lock:
            for table in self.tables.values():
                table.barrier.abort()


class ThreadDevice(ShardedOperators):
    """One device of a mesh, in its own thread."""

    def __init__(self, room: _Rendezvous, rank: int) -> None:
        self.room, self.mesh, self.coordinate = room, room.mesh, room.mesh.coordinate(rank)

    def group(self, axes: Axes) -> _ThreadPeers:
        """Returns the threads along these axes."""
        names, mesh = (axes,) if isinstance(axes, str) else tuple(axes), self.mesh
        index, size = 0, 1
        for name in names:
            index = index * mesh.axis_size(name) + self.coordinate[name]
            size *= mesh.axis_size(name)
        others = tuple(v for n, v in self.coordinate.items() if n not in names)
        return _ThreadPeers(
            mesh, names, self.coordinate, index, size, self.room.table((names, others), size)
        )


def on_all_devices(mesh: Mesh, run: Callable[[int, ThreadDevice], Value]) -> Sequence[Value]:
    """Runs `run` for each rank and device of a mesh concurrently, and returns the results.

    Raises:
        Exception: the error of the first device that failed by itself rather than by waiting.
    """
    room = _Rendezvous(mesh)

    def one(rank: int) -> Value:
        try:
            return run(rank, ThreadDevice(room, rank))
        except BaseException:
            room.leave()
            raise

    with ThreadPoolExecutor(mesh.size) as pool:
        futures = [pool.submit(one, rank) for rank in range(mesh.size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]

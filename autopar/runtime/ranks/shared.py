"""The processes of torch's default group, and the groups that they form.

`Peers` is the one place that creates process groups. Programs of one process share groups of equal
ranks, and the last one to release a group ends it. Groups are created by all processes together but
released by each for itself, perhaps by its garbage collector. So before a group is shared all ranks
compare which ones they still have: one that any of them lacks is created again on all.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime import torch_private
from autopar.runtime.ranks.channel import Channel
from autopar.runtime.ranks.dumps import Dumps
from autopar.runtime.ranks.recorder import Recorder

# Backends whose groups a process may end alone; NCCL's ranks may wait for one another there.
_ENDED_ALONE = ("gloo", "fake")
_ON_HOST = ("gloo", "fake", "mpi")
_NAMED = 8  # most ranks in the name of a channel


def backend() -> str:
    """Returns the default group's backend for tensors on this process's device, "" without a group.

    `dist.get_backend` does not say it where a group has several, as "cpu:gloo,cuda:nccl", or where
    torch chose them.
    """
    if not dist.is_initialized():
        return ""
    named = dict(entry.split(":") for entry in str(dist.get_backend_config()).split(","))
    return named.get("cuda" if torch.cuda.is_available() else "cpu") or next(iter(named.values()))


def local_device(mesh: Mesh | None = None) -> torch.device:
    """Returns the device on which this process trains: its GPU, or the CPU.

    It is the CPU if the processes communicate over a backend of the host, such as gloo, and for a
    process without a group if the mesh is one of CPUs. Without a GPU it is always the CPU.
    """
    on_host = mesh is not None and mesh.device.lower() == "cpu"
    if dist.is_initialized():
        on_host = backend() in _ON_HOST
    if on_host or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


Key = tuple[str, tuple[int, ...]]  # purpose, and global ranks


@dataclass(eq=False)
class _Shared:
    """A channel, and its number of users in this process.

    Attributes:
        number: its number among all channels; the same on all ranks.
        ended: whether the process group was released to torch.
    """

    channel: Channel
    number: int
    users: int = 1
    ended: bool = False


class Peers:
    """This process among those of a default group; see `Peers.here`.

    Args:
        whole: the default group; None for a process without one.

    Attributes:
        world, rank: number of processes, and the rank of this one.
        ranks: the global ranks of all processes.
        recorder: records the activity of this process.
        dumps: writes the records.
        everyone: the default group's channel; None for a single process.
    """

    def __init__(self, whole: dist.ProcessGroup | None) -> None:
        self.recorder = Recorder()
        self.dumps = Dumps()
        self.world, self.rank = 1, 0
        self.ranks: tuple[int, ...] = (0,)
        self.everyone: Channel | None = None
        # A weak reference: the group ends when the user destroys it, and all others with it.
        self._whole: ReferenceType[dist.ProcessGroup] | None = None
        self._shared: dict[Key, _Shared] = {}
        self._made = 0
        if whole is not None:
            self._whole = weakref.ref(whole)
            self.world, self.rank = dist.get_world_size(), dist.get_rank()
            self.ranks = tuple(range(self.world))
            if self.world > 1:
                self.everyone = Channel("all", self.ranks, self._whole, self.recorder)

    @classmethod
    def here(cls) -> Peers:
        """Returns the peers in this process's default group; without one it is alone."""
        if not dist.is_initialized():
            return cls(None)
        whole = torch_private.default_group()
        if whole not in _OF_DEFAULT_GROUP:
            _OF_DEFAULT_GROUP[whole] = cls(whole)
        return _OF_DEFAULT_GROUP[whole]

    def from_rank(self, rank: int, value: Tensor) -> Tensor:
        """Returns the tensor of `rank`; every process calls it with a tensor of equal type."""
        if self.everyone is None:
            return value
        value = value.contiguous()
        self.everyone.broadcast(value, rank)
        return value

    def shared(self, purpose: str, groups: Sequence[tuple[int, ...]]) -> Lease:
        """Returns channels of groups of ranks; every process must call it at the same point.

        Args:
            purpose: groups of equal ranks but different purposes are distinct.
            groups: global ranks of each; this process need not be a member.
        """
        if self._whole is None or not groups:
            return Lease(self, [])
        keys = [(purpose, ranks) for ranks in groups]
        present = [self._shared.get(key) for key in keys]
        for one in present:
            if one is not None:
                one.users += 1  # from here on it is not ended
        agreed = self._agreed([-1 if one is None or one.ended else one.number for one in present])
        channels: list[_Shared] = []
        for key, one, alike in zip(keys, present, agreed, strict=True):
            if one is None or not alike:
                if one is not None:
                    self._give_back([one], collected=False)
                one = self._shared[key] = self._make(*key)
            channels.append(one)
        return Lease(self, channels)

    def within(self, replicas: Sequence[tuple[int, ...]]) -> Peers:
        """Returns this process's replica, as if its ranks were all there are.

        Every process calls it with equal arguments, and then asks its replica for groups at the
        same points, because a request for groups creates those of all replicas.

        Args:
            replicas: the global ranks of each, all of one size, in one order.
        """
        return _Replica(self, replicas)

    def own(self, purpose: str, backend: str | None = None) -> Lease:
        """Returns an unshared channel of all processes, for work that overlaps with other programs.

        Args:
            purpose: name in records.
            backend: torch backend; None for the default.
        """
        return Lease(self, [self._make(purpose, tuple(range(self.world)), backend)])

    def left(self, purpose: str, ranks: tuple[int, ...], name: str) -> Lease:
        """Returns an unshared channel of some ranks, which alone call it; others may be lost.

        Args:
            purpose: name in records.
            ranks: global ranks, this one included.
            name: of the process group; the same on these ranks, and of no other group.
        """
        return Lease(self, [self._make(purpose, ranks, name=name)])

    def _agreed(self, numbers: Sequence[int]) -> list[bool]:
        """Returns which of these channel numbers (-1 for none) are equal on all ranks."""
        if self.everyone is None:
            return [number >= 0 for number in numbers]
        span = torch.tensor([*numbers, *(-n for n in numbers)], device=local_device())
        self.everyone.all_reduce(span, dist.ReduceOp.MAX)
        largest, smallest = span[: len(numbers)].tolist(), (-span[len(numbers) :]).tolist()
        return [low == high >= 0 for low, high in zip(smallest, largest, strict=True)]

    def _make(
        self,
        purpose: str,
        ranks: tuple[int, ...],
        backend: str | None = None,
        name: str = "",
    ) -> _Shared:
        """Creates a process group with the time-out that the user gave the default one.

        All processes call it, or its members alone if it has a name.
        """
        whole = torch_private.default_group()
        timeout = torch_private.timeout_of(whole)
        if name:
            handle = torch_private.group_by_name(list(ranks), timeout, name)
        else:
            handle = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        kept, alive = handle if self.rank in ranks else None, weakref.ref(whole)
        channel = Channel(
            _name(purpose, ranks),
            ranks,
            lambda: None if alive() is None else kept,
            self.recorder,
        )
        self._made += 1
        return _Shared(channel, self._made)

    def _give_back(self, held: Sequence[_Shared], collected: bool) -> None:
        """Ends the process groups that have no users any more.

        Groups released by the garbage collector stay for the next program, if their ranks might
        wait for one another in ending them.
        """
        whole = None if self._whole is None else self._whole()
        there = whole is not None and dist.group.WORLD is whole
        for one in held:
            one.users -= 1
            if one.users or (collected and there and backend() not in _ENDED_ALONE):
                continue
            one.ended = True
            for key in [key for key, other in self._shared.items() if other is one]:
                del self._shared[key]
            handle = one.channel.take()
            if there and handle is not None:
                dist.destroy_process_group(handle)


class _Replica(Peers):
    """The peers of one replica; see `Peers.within`."""

    def __init__(self, whole: Peers, replicas: Sequence[tuple[int, ...]]) -> None:
        super().__init__(None)
        self.recorder, self.dumps, self.rank = whole.recorder, whole.dumps, whole.rank
        self._around, self._replicas = whole, tuple(replicas)
        self._number = next(n for n, ranks in enumerate(replicas) if whole.rank in ranks)
        self.ranks = self._replicas[self._number]
        self.world = len(self.ranks)
        if self.world > 1:
            self._lease = self.shared("replica", [self.ranks])
            (self.everyone,) = self._lease.channels

    def shared(self, purpose: str, groups: Sequence[tuple[int, ...]]) -> Lease:
        places = [[self.ranks.index(rank) for rank in ranks] for ranks in groups]
        everywhere = [
            tuple(members[place] for place in group)
            for members in self._replicas
            for group in places
        ]
        lease = self._around.shared(purpose, everywhere)
        if lease.channels:
            first = self._number * len(groups)
            lease.channels = lease.channels[first : first + len(groups)]
        return lease

    def own(self, purpose: str, backend: str | None = None) -> Lease:
        return self._around.own(purpose, backend)


def _name(purpose: str, ranks: tuple[int, ...]) -> str:
    """Returns the name of a channel in records, short for any number of ranks."""
    if len(ranks) <= _NAMED:
        return f"{purpose} {', '.join(map(str, ranks))}"
    number = zlib.crc32(repr(ranks).encode())
    return f"{purpose} of {len(ranks)} ranks from {ranks[0]}, {number:08x}"


# torch's default group is global to the process; shared groups have the same lifetime.
_OF_DEFAULT_GROUP: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()


class Lease:
    """Channels in use, until they are closed or the lease is garbage-collected."""

    def __init__(self, peers: Peers, held: Sequence[_Shared]) -> None:
        self.channels = tuple(one.channel for one in held)
        self._peers, self._held = peers, held
        self._collected = weakref.finalize(self, peers._give_back, held, collected=True)
        self._collected.atexit = False  # a process that ends releases everything

    def close(self) -> None:
        """Releases the channels; may be called repeatedly."""
        if self._collected.detach() is not None:
            self._peers._give_back(self._held, collected=False)

"""Buckets: groups of a device's trained tensors that are synchronised in one message.

All tensors of a bucket are split over the same axes of the replica's mesh, so that devices of a
replica that hold the same shards have equal buckets, get equal sums, and stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.communication.quantised import pack, unpack
from autopar.runtime.outer.method import Method
from autopar.runtime.parameters.shards import Weight, Weights
from autopar.runtime.ranks.channel import Channel, PendingCall

Key = tuple[int, torch.dtype, frozenset[str]]  # fragment, dtype, axes
LIMIT = 2**25  # bytes of a bucket; one larger tensor forms its own
CHUNK = 2**15  # elements that an outer method works on at a time


@dataclass(eq=False)
class Bucket:
    """Tensors of one dtype with the state of the outer method.

    Attributes:
        tensors: the tensors that the optimizer updates, on the device or in host memory.
        keys: ids of the tensors that the optimizer updates.
        fragment: the fragment to which they belong.
        device: the device of the averages.
        states: flat tensors by name.
        message: the sum in flight, or the average to apply next; None if there is none.
        work: the pending call of the message.
        sent: a copy of what was sent, if it may have to be sent again.
    """

    tensors: list[Tensor]
    keys: list[int]
    fragment: int
    device: torch.device
    states: dict[str, Tensor] = field(default_factory=dict)
    message: Tensor | None = None
    work: PendingCall | None = None
    sent: Tensor | None = None

    @torch.no_grad()
    def values(self) -> Tensor:
        """Returns a flat copy of the tensors, on the device."""
        return torch.cat([tensor.detach().reshape(-1).to(self.device) for tensor in self.tensors])

    @torch.no_grad()
    def give(self, values: Tensor) -> None:
        """Stores flat values in the tensors."""
        for tensor, part in zip(self.tensors, self.parts(values), strict=True):
            tensor.copy_(part)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Returns views of a flat tensor, shaped like the tensors."""
        pieces = flat.split([tensor.numel() for tensor in self.tensors])
        return [p.view(t.shape) for p, t in zip(pieces, self.tensors, strict=True)]

    def chunks(self, *flats: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yields views of flat tensors, and the states of the same elements as a last item.

        Outer methods work elementwise and in several passes: on a CPU the elements of a chunk stay
        in its cache in between.
        """
        size = max(self.numel, 1) if self.device.type != "cpu" else CHUNK
        for start in range(0, self.numel, size):
            part = slice(start, start + size)
            states = {name: flat[part] for name, flat in self.states.items()}
            yield (*(flat[part] for flat in flats), states)

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return sum(tensor.numel() for tensor in self.tensors)

    def restart(self, method: Method) -> None:
        """Resets the states: anchors are copies of the tensors, other states are zero."""
        self.message = self.work = None
        values = self.values()
        for name in method.states:
            begun = values if name == "anchor" else torch.zeros_like(values)
            if name in self.states:
                self.states[name].copy_(begun)
            else:
                self.states[name] = begun.clone()

    def send(self, message: Tensor, channel: Channel, quantised: bool) -> None:
        """Starts the sum of a flat tensor over the peers, which overlaps with computation."""
        if not quantised:
            self.message, self.work = message, channel.all_reduce_async(message)
            return
        own = pack([message.float().view(1, -1)]).view(-1)
        self.message = own.new_empty(len(channel.ranks) * own.numel())
        self.work = channel.all_gather(self.message, own, ahead=True)

    @property
    def is_sent(self) -> bool:
        """Returns whether no message is in flight."""
        return self.work is None or self.work.is_completed()

    def arrive(self, peers: int, quantised: bool) -> None:
        """Waits for the sum and stores the average in `message`."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        assert self.message is not None
        if quantised:
            count = sum(tensor.numel() for tensor in self.tensors)
            (rows,) = unpack(self.message.view(peers, -1), [count], torch.float32)
            self.message = rows.sum(0).to(self.tensors[0].dtype)
        self.message.div_(peers)


def buckets_of(
    weights: Sequence[Weights], method: Method, device: torch.device, separate: Collection[str] = ()
) -> list[Bucket]:
    """Returns the buckets of all trained tensors of a device.

    Args:
        weights: weights of the program, or of its local stages.
        method: the outer method.
        device: the device of the program.
        separate: names of parameters that get separate buckets, because other devices of the
            replica hold them together with other parameters.
    """
    found = []
    for own in weights:
        for together, fragment in _together(own, method, separate):
            places = [own.masters.get(id(w.updated), w.updated) for w in together]
            keys = [id(w.updated) for w in together]
            found.append(Bucket(places, keys, fragment, device))
    for bucket in found:
        bucket.restart(method)
    return found


def _together(
    weights: Weights, method: Method, separate: Collection[str]
) -> Iterator[tuple[list[Weight], int]]:
    """Yields the weights and the fragment of every bucket."""
    trained = [w for w in weights.all if w.updated.requires_grad]
    sizes = [math.prod(w.type.shape) for w in trained]
    total, before = max(sum(sizes), 1), 0
    waiting: dict[Key, list[Weight]] = {}
    filled: dict[Key, int] = {}
    for weight, size in zip(trained, sizes, strict=True):
        fragment = min(method.fragments - 1, method.fragments * (2 * before + size) // (2 * total))
        before += size
        if weight.name in separate:
            yield [weight], method.fragments - 1
            continue
        # Use sizes of whole tensors, because all devices must form the same fragments.
        nbytes = size * weight.updated.element_size()
        axes = frozenset(weight.storage.updated.sharded_axes)
        key = (fragment, weight.updated.dtype, axes)
        if waiting.get(key) and filled[key] + nbytes > LIMIT:
            yield waiting.pop(key), fragment
        if key not in waiting:
            waiting[key], filled[key] = [], 0
        waiting[key].append(weight)
        filled[key] += nbytes
    for key, together in waiting.items():
        yield together, key[0]

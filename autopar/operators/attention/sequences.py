"""Positions that each device of a group has, and exchanges from one such order to another.

In a contiguous order device i has the i-th part of the sequence. In a zigzag order of n devices it
has the parts i and 2n - 1 - i of 2n, so that a causal mask leaves all devices equally much to do
(Brandon et al., "Striped Attention", arXiv:2311.09431, have the idea with stripes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.tensor import part_of
from autopar.operators.peer_devices import Peers

Run = tuple[int, int]  # first position and length
Order = list[tuple[Run, ...]]  # runs of each device, in the order in which it has them


def contiguous(peers: Peers, extent: int) -> Order:
    """Returns the order of a split dimension."""
    return [(block,) for block in peers.blocks(extent)]


def zigzag(peers: Peers, extent: int) -> Order:
    """Returns the order in which each device has a part of the head and one of the tail."""
    count = 2 * peers.size
    return [
        (part_of(extent, count, i), part_of(extent, count, count - 1 - i))
        for i in range(peers.size)
    ]


def turned(order: Order, turns: Sequence[int]) -> Order:
    """Returns the order in which each device has what those so many places before it have."""
    return [
        tuple(run for turn in turns for run in order[(at - turn) % len(order)])
        for at in range(len(order))
    ]


def length(runs: Sequence[Run]) -> int:
    """Returns the number of positions of a device."""
    return sum(size for _, size in runs)


@dataclass(frozen=True)
class Parcel:
    """A tensor whose positions, its last dimension but one, change devices.

    Attributes:
        tensor: this device's positions.
        before, after: the orders of all devices.
    """

    tensor: Tensor
    before: Order
    after: Order


def dealt(parcels: Sequence[Parcel], peers: Peers) -> Callable[[], list[Tensor]]:
    """Starts to send tensors into other orders, all in one call.

    What is returned waits for the tensors. Positions that several devices send are summed.
    """
    me, everyone = peers.index, range(peers.size)
    # Where dtypes differ, bytes: the widest first, so that each begins at a multiple of its size.
    mixed = len({parcel.tensor.dtype for parcel in parcels}) > 1
    ranked = sorted(parcels, key=lambda parcel: -parcel.tensor.element_size())
    nothing = ranked[0].tensor.new_empty(0)

    def flat(x: Tensor) -> Tensor:
        return x.reshape(-1).view(torch.uint8) if mixed else x.reshape(-1)

    sent = [
        torch.cat(
            [
                flat(parcel.tensor.narrow(-2, at, size))
                for parcel in ranked
                for at, _, size in _shared(parcel.before[me], parcel.after[other])
            ]
            or [flat(nothing)]
        )
        for other in everyone
    ]
    takes = [
        sum(
            size * _row_size(parcel.tensor) * (parcel.tensor.element_size() if mixed else 1)
            for parcel in ranked
            for _, _, size in _shared(parcel.before[other], parcel.after[me])
        )
        for other in everyone
    ]
    wait = peers.deal(sent, takes)

    def arrive() -> list[Tensor]:
        results = {id(parcel): _opened(parcel, me) for parcel in parcels}
        for other, row in enumerate(wait()):
            start = 0
            for parcel in ranked:
                for _, at, size in _shared(parcel.before[other], parcel.after[me]):
                    part = results[id(parcel)].narrow(-2, at, size)
                    count = part.numel() * (part.element_size() if mixed else 1)
                    piece = row.narrow(0, start, count)
                    part.add_((piece.view(part.dtype) if mixed else piece).view(part.shape))
                    start += count
        return [results[id(parcel)] for parcel in parcels]

    return arrive


def _row_size(x: Tensor) -> int:
    """Returns the number of elements at one position."""
    return math.prod(x.shape[:-2]) * x.shape[-1]


def _opened(parcel: Parcel, me: int) -> Tensor:
    """Returns zeros for the positions that a device gets."""
    x = parcel.tensor
    return x.new_zeros((*x.shape[:-2], length(parcel.after[me]), x.shape[-1]))


def _shared(old: Sequence[Run], new: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """Yields what two devices have in common: its place on each, and its length."""
    at = 0
    for start, size in old:
        to = 0
        for first, count in new:
            low, high = max(start, first), min(start + size, first + count)
            if low < high:
                yield at + low - start, to + low - first, high - low
            to += count
        at += size

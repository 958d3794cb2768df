"""Orders of positions over the devices of a group, and exchanges from one order to another.

In a contiguous order, device i has the i-th part of the sequence. In a zigzag order of n devices,
it has the parts i and 2n - 1 - i of 2n, so that a causal mask leaves equal work to all devices
(Brandon et al., "Striped Attention", arXiv:2311.09431, balance the work with stripes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.tensor import part_of
from autopar.operators.peer_devices import Peers

Run = tuple[int, int]  # first position and length
Order = list[tuple[Run, ...]]  # the runs of each device, in local order


def contiguous(peers: Peers, extent: int) -> Order:
    """Returns the order of a split dimension, in which every device has one range."""
    return [(block,) for block in peers.blocks(extent)]


def zigzag(peers: Peers, extent: int) -> Order:
    """Returns the order in which each device has a part of the first half and one of the second."""
    count = 2 * peers.size
    return [
        (part_of(extent, count, i), part_of(extent, count, count - 1 - i))
        for i in range(peers.size)
    ]


def turned(order: Order, turns: Sequence[int]) -> Order:
    """Returns the order in which each device has the runs of the devices `turns` places before."""
    return [
        tuple(run for turn in turns for run in order[(at - turn) % len(order)])
        for at in range(len(order))
    ]


def length(runs: Sequence[Run]) -> int:
    """Returns the number of positions of a device."""
    return sum(size for _, size in runs)


@dataclass(frozen=True)
class Parcel:
    """A tensor whose positions, its last dimension but one, move to other devices.

    Attributes:
        tensor: this device's positions.
        before, after: the orders of all devices before and after the exchange.
        take: called with the pieces that arrive and their places; None to let `dealt` join them.
    """

    tensor: Tensor
    before: Order
    after: Order
    take: Callable[[Run, Tensor], None] | None = None


def dealt(parcels: Sequence[Parcel], peers: Peers) -> Callable[[], list[Tensor]]:
    """Starts to move tensors into other orders, all in one call.

    Returns a function that waits for the messages and returns the tensors of the parcels without
    `take`. Positions that several devices send are summed.
    """
    me, everyone = peers.index, range(peers.size)
    # If dtypes differ, bytes are sent: the widest dtype first, so that every tensor is aligned.
    mixed = len({parcel.tensor.dtype for parcel in parcels}) > 1
    ranked = sorted(parcels, key=lambda parcel: -parcel.tensor.element_size())
    unit = ranked[0].tensor.element_size() if mixed else 1

    def count(sender: int, receiver: int) -> int:
        return sum(
            size * _row_size(parcel.tensor) * (parcel.tensor.element_size() if mixed else 1)
            for parcel in ranked
            for _, _, size in _shared(parcel.before[sender], parcel.after[receiver])
        )

    sent = [
        [
            _sendable(parcel.tensor.narrow(-2, at, size), mixed)
            for parcel in ranked
            for at, _, size in _shared(parcel.before[me], parcel.after[other])
        ]
        for other in everyone
    ]
    sent[me] = sent[me] or [_sendable(ranked[0].tensor[..., :0, :], mixed)]
    for other in everyone:  # the rows of several senders follow one another, each from a multiple
        missing = 0 if other == me else -count(me, other) % unit
        sent[other] += [ranked[0].tensor.new_zeros(missing, dtype=torch.uint8)] if missing else []
    takes = [-(-count(other, me) // unit) * unit for other in everyone]
    wait = peers.deal(sent, takes)

    def arrive() -> list[Tensor]:
        pieces: dict[int, list[tuple[Run, Tensor]]] = {id(parcel): [] for parcel in parcels}
        for other, row in enumerate(wait()):
            start = 0
            for parcel in ranked:
                x = parcel.tensor
                for place, at, size in _shared(parcel.before[other], parcel.after[me]):
                    if other == me:
                        pieces[id(parcel)].append(((at, size), x.narrow(-2, place, size)))
                        continue
                    count = size * _row_size(x) * (x.element_size() if mixed else 1)
                    piece = row.narrow(0, start, count)
                    piece = (piece.view(x.dtype) if mixed else piece).view(
                        (*x.shape[:-2], size, x.shape[-1])
                    )
                    pieces[id(parcel)].append(((at, size), piece))
                    start += count
        for parcel in parcels:
            take = parcel.take
            if take is not None:
                for run, piece in pieces[id(parcel)]:
                    take(run, piece)
        rest = [parcel for parcel in parcels if parcel.take is None]
        return [_joined(pieces[id(parcel)], parcel, me) for parcel in rest]

    return arrive


def _sendable(x: Tensor, mixed: bool) -> Tensor:
    """Returns a tensor, or its bytes if dtypes are mixed."""
    if not mixed:
        return x
    dense = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)


def _row_size(x: Tensor) -> int:
    """Returns the number of elements at one position."""
    return math.prod(x.shape[:-2]) * x.shape[-1]


def _joined(pieces: list[tuple[Run, Tensor]], parcel: Parcel, me: int) -> Tensor:
    """Returns the received pieces of a tensor as one tensor."""
    pieces = sorted(pieces, key=lambda piece: piece[0])
    every, at = length(parcel.after[me]), 0
    for (start, size), _ in pieces:
        at = at + size if start == at else every + 1
    if pieces and at == every:  # the pieces are in order
        return pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces], -2)
    x = parcel.tensor
    total = x.new_zeros((*x.shape[:-2], every, x.shape[-1]))
    for run, piece in pieces:
        total.narrow(-2, *run).add_(piece)
    return total


def _shared(old: Sequence[Run], new: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Returns the common runs of two devices: the start on each device, and the length."""
    shared: list[tuple[int, int, int]] = []
    at = 0
    for start, size in old:
        to = 0
        for first, count in new:
            low, high = max(start, first), min(start + size, first + count)
            if low < high:
                shared.append((at + low - start, to + low - first, high - low))
            to += count
        at += size
    return _merged(shared)


def _merged(shared: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merges runs that are adjacent on both devices."""
    merged: list[tuple[int, int, int]] = []
    for at, to, size in shared:
        if merged and (at, to) == (sum(merged[-1][::2]), sum(merged[-1][1:])):
            at, to, size = *merged[-1][:2], merged.pop()[2] + size
        merged.append((at, to, size))
    return merged

"""Positions that each device of a group has, and exchanges from one such order to another.

In a contiguous order device i has the i-th part of the sequence. In a zigzag order of n devices it
has the parts i and 2n - 1 - i of 2n, so that a causal mask leaves all devices equally much to do
(Brandon et al., "Striped Attention", arXiv:2311.09431, have the idea with stripes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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


def length(runs: Sequence[Run]) -> int:
    """Returns the number of positions of a device."""
    return sum(size for _, size in runs)


def redealt(
    tensors: Sequence[Tensor], before: Sequence[Order], after: Sequence[Order], peers: Peers
) -> tuple[Tensor, ...]:
    """Returns tensors in other orders of their last dimension but one, all sent in one call.

    Args:
        tensors: each device's positions.
        before, after: the orders of each tensor.
        peers: the devices.
    """
    found: tuple[Tensor, ...] = _Redealt.apply(  # type: ignore[no-untyped-call]
        before, after, peers, *tensors
    )
    return found


class _Redealt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, before: Sequence[Order], after: Sequence[Order], peers: Peers, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.orders, ctx.peers = (after, before), peers
        return _deal(tensors, before, after, peers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_deal(gradients, ctx.orders[0], ctx.orders[1], ctx.peers)


def _deal(
    tensors: Sequence[Tensor], before: Sequence[Order], after: Sequence[Order], peers: Peers
) -> tuple[Tensor, ...]:
    me, everyone = peers.index, range(peers.size)
    sent = [
        torch.cat(
            [
                x.narrow(-2, at, size).reshape(-1)
                for x, old, new in zip(tensors, before, after, strict=True)
                for at, _, size in _shared(old[me], new[other])
            ]
            or [tensors[0].new_empty(0)]
        )
        for other in everyone
    ]
    takes = [
        sum(
            size * (x.numel() // x.shape[-2])
            for x, old, new in zip(tensors, before, after, strict=True)
            for _, _, size in _shared(old[other], new[me])
        )
        for other in everyone
    ]
    taken = peers.deal(sent, takes)()
    results = [
        x.new_empty((*x.shape[:-2], length(new[me]), x.shape[-1]))
        for x, new in zip(tensors, after, strict=True)
    ]
    for other in everyone:
        start = 0
        for result, old, new in zip(results, before, after, strict=True):
            for _, at, size in _shared(old[other], new[me]):
                part = result.narrow(-2, at, size)
                part.copy_(taken[other].narrow(0, start, part.numel()).view(part.shape))
                start += part.numel()
    return tuple(results)


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

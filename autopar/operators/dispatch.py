"""Expert parallelism: rows of tokens travel to the devices of their experts, and back.

Tokens and experts are split over the same devices. Each device sorts its rows by owner, says how
many there are of each expert, sends them by an all_to_all of unequal parts, multiplies the rows
that it receives, and sends the results back (GShard, arXiv:2006.16668, section 3.2, without a
capacity: no row is dropped and none is padded, as in MegaBlocks, arXiv:2211.15841). Gradients take
the same ways in the opposite direction, so that those of an expert are complete at its owner.

Over several axes rows take one hop for each group of axes, for example first inside a node and then
between nodes (Hwang et al., "Tutel", arXiv:2206.03382, section 3.4): fewer and longer messages, for
one more hop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.operators.mixture import added, through_experts
from autopar.operators.peer_devices import Peers, travelled

Weights = tuple[Tensor, Tensor, Tensor]
Compute = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Hop:
    """One all_to_all: the devices along some axes, and who of them takes the rows of an expert.

    Attributes:
        peers: the devices.
        takers: for each expert the number of the device's block among them; -1 if it is an expert
            that no device of this dispatch has.
    """

    peers: Peers
    takers: tuple[int, ...]


@functools.cache
def takers(
    mesh: Mesh,
    axes: tuple[str, ...],
    over: tuple[str, ...],
    own: tuple[tuple[str, int], ...],
    size: int,
) -> tuple[int, ...]:
    """Returns for each expert the block number, along `over`, of the devices that have it.

    Args:
        mesh: the devices.
        axes: the axes that split the experts, outermost first.
        over: those of them along which rows travel in this hop.
        own: coordinates along the axes of `axes` on which rows do not travel at all.
        size: the number of experts.
    """
    result, layout, here = [-1] * size, Layout((axes,)), dict(own)
    for place in product(*(range(mesh.axis_size(axis)) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        if any(at[axis] != index for axis, index in here.items()):
            continue
        block = 0
        for axis in over:
            block = block * mesh.axis_size(axis) + at[axis]
        ((start, length),) = layout.bounds((size,), mesh, at)
        result[start : start + length] = [block] * length
    return tuple(result)


def dispatched(rows: Tensor, experts: Tensor, hops: Sequence[Hop], compute: Compute) -> Tensor:
    """Returns `compute` of each row at the device of its expert, in the order of `rows`.

    Every device takes part in every hop, also with no rows at all.

    Args:
        rows: [rows, width].
        experts: the expert of each row, [rows], of which some device of the hops has it.
        hops: the hops, in the order in which they are taken.
        compute: maps rows [n, width] and their experts [n] to results [n, any width].
    """
    if not hops:
        return compute(rows, experts)
    hop, *later = hops
    order, arrived, sends, takes = _sorted(experts, hop)
    there = travelled(rows[order], sends, takes, hop.peers)
    results = dispatched(there, arrived, later, compute)
    return travelled(results, takes, sends, hop.peers)[_inverse(order)]


def dispatched_mixture(
    weights: Weights,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    act: str,
    hops: Sequence[Hop],
    first: int,
) -> Tensor:
    """Returns what the experts of the hops contribute to this device's tokens.

    Args:
        weights: gate, up and down of this device's experts, as for `mixture`.
        x, ids, scores: this device's tokens, their experts and the weights of these.
        act: the activation.
        hops: how rows get to their experts.
        first: number of this device's first expert.
    """
    gate, up, down = weights
    experts = gate.shape[0]

    def compute(rows: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen - first, minlength=experts)
        given = through_experts(gate, up, down, rows[order], counts.cumsum(0).int(), act)
        return given[_inverse(order)]

    flat, places = ids.flatten(), _count(ids.flatten())
    if -1 in hops[0].takers:
        places = torch.tensor(hops[0].takers, device=ids.device)[flat].ge(0).nonzero().flatten()
    rows = x.flatten(0, -2)[places // ids.shape[-1]]
    return added(dispatched(rows, flat[places], hops, compute), places, x, scores)


def _sorted(experts: Tensor, hop: Hop) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Returns the order by taker and expert, the experts that arrive, and rows per device."""
    size, devices = len(hop.takers), hop.peers.size
    takers = torch.tensor(hop.takers, device=experts.device)
    places = takers[experts] * size + experts
    order = places.argsort(stable=True)
    sent = torch.bincount(places, minlength=devices * size).view(devices, size)
    taken = hop.peers.swap(sent)
    ids = torch.arange(size, device=experts.device).repeat(devices)
    arrived = ids.repeat_interleave(taken.flatten())
    sends, takes = torch.stack([sent.sum(1), taken.sum(1)]).tolist()
    return order, arrived, sends, takes


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, _count(order))


def _count(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device, dtype=like.dtype)

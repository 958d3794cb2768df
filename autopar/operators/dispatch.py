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
from autopar.operators.mixture import Experts, added, gathered
from autopar.operators.peer_devices import Peers, travelled

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


def dispatched(
    experts: Experts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    hops: Sequence[Hop],
    first: int,
    kernels: bool = False,
) -> Tensor:
    """Returns what the experts of the hops contribute to this device's tokens.

    Every device takes part in every hop, also with no rows at all.

    Args:
        experts: this device's experts.
        x, ids, weights: this device's tokens, their experts and the weights of these.
        hops: how rows get to their experts, at least one.
        first: number of this device's first expert.
        kernels: as for `mixture`.
    """

    def compute(rows: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen - first, minlength=experts.count)
        return experts(rows[order], counts.cumsum(0).int())[_inverse(order)]

    (hop, *later), flat = hops, ids.flatten()
    places = _count(flat)
    if -1 in hop.takers:
        places = torch.tensor(hop.takers, device=ids.device)[flat].ge(0).nonzero().flatten()
    route = _route(flat[places], hop)
    places = places[route.order]
    rows, inverse = gathered(x, places, ids.shape[-1], kernels)
    given = route.there_and_back(rows, lambda there: _onward(there, route.arrived, later, compute))
    return added(given, places, inverse, x, weights)


def _onward(rows: Tensor, experts: Tensor, hops: Sequence[Hop], compute: Compute) -> Tensor:
    """Returns `compute` of each row at the device of its expert, in the order of `rows`."""
    if not hops:
        return compute(rows, experts)
    hop, *later = hops
    route = _route(experts, hop)
    results = route.there_and_back(
        rows[route.order], lambda there: _onward(there, route.arrived, later, compute)
    )
    return results[_inverse(route.order)]


@dataclass(frozen=True)
class _Route:
    """One hop of these rows.

    Attributes:
        order: the rows in the order in which they are sent, by taker and expert.
        arrived: the experts of the rows that arrive.
        sends, takes: rows to and from each device.
        peers: the devices.
    """

    order: Tensor
    arrived: Tensor
    sends: list[int]
    takes: list[int]
    peers: Peers

    def there_and_back(self, rows: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what is computed of rows, in their order, where they arrive."""
        there = travelled(rows, self.sends, self.takes, self.peers)
        return travelled(compute(there), self.takes, self.sends, self.peers)


def _route(experts: Tensor, hop: Hop) -> _Route:
    """Returns the route of rows of these experts, once devices know how many arrive."""
    size, devices = len(hop.takers), hop.peers.size
    takers = torch.tensor(hop.takers, device=experts.device)
    places = takers[experts] * size + experts
    order = places.argsort(stable=True)
    sent = torch.bincount(places, minlength=devices * size).view(devices, size)
    taken = hop.peers.swap(sent)
    ids = torch.arange(size, device=experts.device).repeat(devices)
    arrived = ids.repeat_interleave(taken.flatten())
    sends, takes = torch.stack([sent.sum(1), taken.sum(1)]).tolist()
    return _Route(order, arrived, sends, takes, hop.peers)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, _count(order))


def _count(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device, dtype=like.dtype)

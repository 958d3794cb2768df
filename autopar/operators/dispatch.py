"""Expert parallelism: tokens travel to the devices of their experts, and results travel back.

Tokens and experts are split over the same devices. A device sends each of its tokens once to every
device that has some of its experts, with their numbers and weights. This is an all_to_all of
unequal parts, whose lengths are exchanged first. Each device applies its experts to the tokens that
arrive, sums the results of each token, and sends the sums back. No token is dropped and none is
padded (as in MegaBlocks, arXiv:2211.15841; GShard, arXiv:2006.16668, section 3.2, has a capacity
instead). Gradients travel the same way in the opposite direction, so the gradient of an expert is
complete on its owner.

Over several axes tokens take one hop for each group of axes: first to every node that has some of
their experts, and from there to the devices inside (DeepSeek-V3, arXiv:2412.19437, section 3.2.2).
A token thus crosses slow links once for each node.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import DTYPE_BYTES, Layout
from autopar.operators.expert_load import part_shares
from autopar.operators.form import Calls, Part
from autopar.operators.mixture import Experts, by_name, mixture

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.operators.peer_devices import Peers

ABSENT = -1  # the expert of a place whose expert is elsewhere


@dataclass(frozen=True)
class Hop:
    """One all_to_all: the devices along some axes, and which of them takes the rows of an expert.

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

    Every device takes part in every hop, also with no tokens at all.

    Args:
        experts: this device's experts.
        x: tokens, [..., width].
        ids: their experts, [..., k]; `ABSENT` for none.
        weights: the weights of these, [..., k].
        hops: how tokens get to their experts.
        first: number of this device's first expert.
        kernels: as for `mixture`.
    """
    import torch

    from autopar.operators.peer_devices import travelled

    if not hops:
        return mixture(experts, x, ids, weights, first, first + experts.count + 1, kernels)
    (hop, *later), peers = hops, hops[0].peers
    flat, chosen, given = (t.flatten(0, -2) for t in (x, ids, weights))
    takers = torch.tensor((*hop.takers, ABSENT), device=ids.device)[chosen]
    devices = torch.arange(peers.size, device=ids.device)
    taker, token = (takers == devices.view(-1, 1, 1)).any(-1).nonzero().unbind(1)
    sent = torch.bincount(taker, minlength=peers.size)
    sends, takes = torch.stack([sent, peers.swap(sent.unsqueeze(1)).flatten()]).tolist()
    own = takers[token] == taker.unsqueeze(1)
    there = peers.rows(chosen[token].masked_fill(~own, ABSENT), sends, takes)
    rows, scores = travelled((flat[token], given[token]), sends, takes, peers)
    sums = dispatched(experts, rows, there, scores, later, first, kernels)
    (back,) = travelled((sums,), takes, sends, peers)
    total = back.new_zeros(flat.shape).index_put_((token,), back, accumulate=True)
    return total.view(x.shape)


def dispatch_messages(part: Part, hops: Sequence[tuple[str, ...]]) -> Calls:
    """Returns the all_to_all of tokens to their experts and back, and those of their numbers.

    All devices have equally many tokens; the device with the busiest experts determines the time.

    Args:
        part: a mixture in layouts.
        hops: the axes of each hop; none if no axis splits tokens and experts.
    """
    named = by_name(part.node, range(len(part.types)))
    x, ids, weights = (part.operand(named[name]) for name in ("x", "ids", "weights"))
    k, row = ids.shape[-1], x.shape[-1] * DTYPE_BYTES[x.dtype]
    there = row + k * (DTYPE_BYTES[weights.dtype] + DTYPE_BYTES[ids.dtype])
    up, layout = part.types[named["up"]], part.operands[named["up"]]
    shares = part_shares(part.node, up, layout, part.mesh)
    forward: list[Collective] = []
    back: list[Collective] = []
    for at, axes in enumerate(hops):
        passed = tuple(axis for hop in hops[: at + 1] for axis in hop)
        rows = math.prod(ids.shape[:-1]) * arrivals(up.shape[0], shares(passed), k)
        numbers = part.ways(axes) * DTYPE_BYTES["i64"]
        sizes = (numbers, math.ceil(rows * there))
        forward += (Collective("all_to_all", axes, nbytes) for nbytes in sizes)
        back.insert(0, Collective("all_to_all", axes, math.ceil(rows * row)))
    return (*forward, *back), (*back[::-1], *forward[1::2][::-1])


def arrivals(experts: int, parts: Sequence[float], k: int) -> float:
    """Returns the number of devices to which a token goes, if all were as busy as the busiest.

    A device takes a token unless none of its k different experts is there. With equal shares that
    is the hypergeometric probability, else the choices are taken as independent.

    Args:
        experts: number of experts.
        parts: the share of the rows of each device's experts; they sum to one, or less where
            others' experts take the rest.
        k: experts of a token.
    """
    busiest = max(parts)
    own = busiest * experts
    if math.isclose(min(parts), busiest) and math.isclose(own, round(own)):
        missed = math.prod(max(experts - own - i, 0.0) / (experts - i) for i in range(k))
    else:
        missed = (1 - min(busiest, 1.0)) ** k
    return (1 - missed) * len(parts)

"""Expert parallelism: tokens travel to the devices of their experts, and results travel back.

Tokens and experts are split over the same devices. A device sends each of its tokens once to every
device that holds experts of this token, with the numbers and weights of these experts. This is an
all_to_all of unequal parts, whose lengths are exchanged first. Each device applies its experts to
the tokens that arrive, sums the results of each token, and sends the sums back. No token is dropped
and no row is padded (as in MegaBlocks, arXiv:2211.15841; GShard, arXiv:2006.16668, section 3.2,
limits the capacity of experts instead). Gradients take the reverse path, so the gradient of an
expert is complete on the device that holds it.

Over several axes, tokens take one hop for each group of axes: first to every node that holds
experts of the token, and from there to the devices inside the node (DeepSeek-V3, arXiv:2412.19437,
section 3.2.2). A token thus crosses slow links once for each node.
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
from autopar.operators.expert_load import among, part_shares
from autopar.operators.form import Calls, Part
from autopar.operators.mixture import Experts, by_name, mixture

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.operators.peer_devices import Peers

ABSENT = -1  # expert number of a choice whose expert is on other devices


@dataclass(frozen=True)
class Hop:
    """One all_to_all: the devices along some axes, and the receiver of each expert's rows.

    Attributes:
        peers: the devices.
        takers: for each expert, the number of the receiving device's block; -1 if no device of this
            dispatch holds the expert.
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
    """Returns for each expert the block number, along `over`, of the devices that hold it.

    Args:
        mesh: the devices.
        axes: the axes that split the experts, outermost first.
        over: the axes among these along which rows are sent in this hop.
        own: this device's coordinates along the axes among these over which no rows are sent.
        size: number of experts.
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
    """Returns the contribution of all experts to this device's tokens.

    Every device takes part in every hop, even if it has no tokens.

    Args:
        experts: this device's experts.
        x: tokens, [..., width].
        ids: expert numbers of the tokens, [..., k]; `ABSENT` for none.
        weights: routing weights of these experts, [..., k].
        hops: the hops of tokens to their experts.
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
    """Returns the all_to_alls of tokens, of expert numbers, and of results on the way back.

    All devices have equally many tokens; the device with the busiest experts determines the time.

    Args:
        part: a mixture in given layouts.
        hops: the axes of each hop; empty if no axis splits both tokens and experts.
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
        rows = math.prod(ids.shape[:-1]) * arrivals(among(part.node, up), shares(passed), k)
        numbers = part.ways(axes) * DTYPE_BYTES["i64"]
        sizes = (numbers, math.ceil(rows * there))
        forward += (Collective("all_to_all", axes, nbytes) for nbytes in sizes)
        back.insert(0, Collective("all_to_all", axes, math.ceil(rows * row)))
    return (*forward, *back), (*back[::-1], *forward[1::2][::-1])


def arrivals(experts: int, parts: Sequence[float], k: int) -> float:
    """Returns the mean number of devices to which a token is sent, scaled to the busiest device.

    A device receives a token if it holds one of its k different experts. With equal shares, this
    probability is hypergeometric; otherwise the choices are treated as independent.

    Args:
        experts: number of experts.
        parts: each device's share of the rows; the sum is less than one if experts outside this
            dispatch take the rest.
        k: number of experts of a token.
    """
    busiest = max(parts)
    own = busiest * experts
    if math.isclose(min(parts), busiest) and math.isclose(own, round(own)):
        missed = math.prod(max(experts - own - i, 0.0) / (experts - i) for i in range(k))
    else:
        missed = (1 - min(busiest, 1.0)) ** k
    return (1 - missed) * len(parts)

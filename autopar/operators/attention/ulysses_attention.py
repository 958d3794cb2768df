"""Attention of some heads over all positions, between two exchanges of sequences for heads.

One call sends queries, keys and values, another the result. Between these calls the sequence may
still be split over the devices of a ring (Fang & Zhao, "USP", arXiv:2405.07719, section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.graph import Node
from autopar.operators.attention.sequence_forms import specified
from autopar.operators.form import Part, Types

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ring_attention import Ring
    from autopar.operators.peer_devices import Peers


def ulysses_attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    how: Attention,
    peers: Peers,
    ring: Ring | None,
    size: tuple[int, int],
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention of this device's queries over the keys of all devices.

    Args:
        tensors: queries, keys and values, [..., heads, positions, width]; their positions are split
            over the devices of the ring, and each of these parts over `peers`.
        mask: mask of all heads, the queries of all `peers` and all keys, broadcast.
        how: options of attention.
        peers: the devices that exchange sequences for heads.
        ring: the devices over which the sequence remains split; None for none.
        size: number of queries and of keys of all `peers` together.
        sinks: one logit per head of the queries; None for none.
    """
    import torch.nn.functional as F

    from autopar.operators.attention.heads import Heads, to_heads, to_rows
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ring_attention import ring_attention
    from autopar.operators.attention.sink_attention import sink_attention

    query, key, value = tensors
    count = query.shape[-3]
    heads = [
        Heads.of(peers, count, x.shape[-3], extent)
        for x, extent in zip(tensors, (size[0], size[1], size[1]), strict=True)
    ]
    query, key, value = to_heads((query, key, value), heads, peers)
    first, own = heads[0].heads[peers.index]
    key, value = (
        _of_each(x, (first, own), count // each.every, each.heads[peers.index][0])
        for x, each in zip((key, value), heads[1:], strict=True)
    )
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, first, own)
    sinks = None if sinks is None else sinks.narrow(0, first, own)
    if ring is not None:
        out = ring_attention(query, key, value, mask, Attention(how.scale, how.causal), ring, sinks)
    elif sinks is not None:
        out = sink_attention(
            query, key, value, mask, sinks=sinks, is_causal=how.causal, scale=how.scale
        )
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=how.causal, scale=how.scale
        )
    return to_rows(out, heads[0], peers)


def _of_each(x: Tensor, own: tuple[int, int], share: int, start: int) -> Tensor:
    """Returns keys or values with one head for each of this device's query heads."""
    if share == 1:
        return x
    return x[..., [head // share - start for head in range(own[0], sum(own))], :, :]


def exchanged_spec(node: Node, types: Types) -> str:
    """Returns the factor string, "" if heads cannot be exchanged for positions."""
    spec = specified(mask=("q!", "u!"))
    return spec(node, types) if _exchangeable(types) else ""


def _exchangeable(types: Types) -> bool:
    """Returns whether queries, keys and values have heads that can be exchanged for positions."""
    ranks = {len(t.shape) for t in types[:3]}
    if len(ranks) > 1 or ranks.pop() < 3:
        return False
    lead = {t.shape[:-3] for t in types[:3]}
    heads = [t.shape[-3] for t in types[:3]]
    return len(lead) == 1 and heads[0] % heads[1] == 0 and heads[0] % heads[2] == 0


def enough_heads(part: Part, axes: tuple[str, ...]) -> bool:
    """Returns whether there is a query head for every device along axes."""
    fewest = part.types[0].shape[-3] // part.ways(part.axes(0, -3))
    return fewest >= part.ways(axes) > 1

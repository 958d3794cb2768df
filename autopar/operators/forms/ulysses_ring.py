"""Ulysses inside a ring, on several axes: heads along the innermost axis, a ring along the others.

The exchange of sequences for heads uses the fast links of the inner axis, and the hops of the ring
use the links of the outer axes (Fang & Zhao, "USP", arXiv:2405.07719).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.operators.attention.sequence_forms import (
    ATTENTION,
    Sizes,
    collective,
    gradient_bytes,
    heads_received,
    is_causal,
    kernels,
    scores_bytes,
    sends_for_heads,
    split,
    with_sinks,
    written,
)
from autopar.operators.attention.ulysses_attention import enough_heads, exchanged_spec
from autopar.operators.device_work import NodeWork
from autopar.operators.form import Calls, Form, Part

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.operators.peer_devices import Axes, Devices


def _run(
    mesh: Devices,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    axis: Axes,
    size: tuple[int, int],
    sinks: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """Attention whose sequence is split over axes: a ring of groups that exchange heads."""
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ring_attention import Ring
    from autopar.operators.attention.ulysses_attention import ulysses_attention

    peers = mesh.group(axis[:-1])
    ring = Ring.of_parts(peers, size)
    start, count = ring.queries[peers.index][0]
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask.narrow(-2, start, count)
    own = count, ring.keys[peers.index][0][1]
    tensors, inner = (query, key, value), mesh.group(axis[-1])
    return ulysses_attention(tensors, mask, Attention.of(**how), inner, ring, own, sinks)


def _fits(part: Part) -> bool:
    axes = split(part)
    return len(axes) > 1 and enough_heads(part, axes[-1:])


def _turns(part: Part) -> int:
    return part.ways(split(part)[:-1])


def _sends(part: Part) -> Calls:
    """Returns the exchanges before and after the ring, and the ring's hops of exchanged blocks."""
    (*outer, inner), sizes = split(part), Sizes.of(part)
    into, out = sends_for_heads(part, (inner,))
    received = (into.nbytes - sizes.query) / max(sizes.pair, 1)
    hop = collective("send", tuple(outer), sizes.pair * received)
    home = collective("send", tuple(outer), gradient_bytes(sizes) * received)
    hops, homes = (hop,) * (_turns(part) - 1), (home,) * (_turns(part) - 1)
    return (into, *hops, out), (out, *hops, *homes, into)


def _work(part: Part) -> NodeWork:
    """Returns the work of a device of the last group of the ring, as in ring attention."""
    count, inner = _turns(part), split(part)[-1:]
    share = (count - 0.5) / count if is_causal(part.node) else 1.0
    return kernels(part, share, count, more=heads_received(part, inner))


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of the exchanged tensors and of the ring's blocks, and of gradients."""
    sizes, inner = Sizes.of(part), split(part)[-1:]
    into, out = sends_for_heads(part, inner)
    ways = part.ways(inner)
    scores = scores_bytes(part, sizes.rows, sizes.keys * ways) * heads_received(part, inner)
    dealt = float(into.nbytes + out.nbytes)
    return 2 * dealt + 2.0 * into.nbytes + scores, 3 * dealt + 4.0 * into.nbytes + 2 * scores


NEEDS = (
    "a sequence that is split over two axes, a head of queries for each device along "
    "the inner one, and no dropout"
)
FORMS = with_sinks(
    Form(
        "ulysses ring",
        ATTENTION,
        exchanged_spec,
        _fits,
        NEEDS,
        "ulysses_ring_attention",
        _run,
        written,
        _sends,
        _work,
        _scratch,
        _turns,
    )
)

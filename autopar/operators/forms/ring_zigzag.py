"""Ring attention under a causal mask, balanced: each device has a part of the head and of the tail.

The sequence stays contiguous outside: queries, keys and values are dealt into the zigzag order in
one call, and the result back in another. Position-dependent values beside attention thus need no
care.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.operators.attention.sequence_forms import (
    ATTENTION,
    Sizes,
    collective,
    gradient_bytes,
    is_causal,
    kernels,
    scores_bytes,
    specified,
    split,
    written,
)
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
    *,
    axis: Axes,
    size: tuple[int, int],
    **how: Any,
) -> Tensor:
    """Causal attention whose sequence is split, each device with equally much to compute."""
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ring_attention import Ring, ring_attention
    from autopar.operators.attention.sequences import contiguous, redealt, zigzag

    peers = mesh.group(axis)
    before = [contiguous(peers, count) for count in (size[0], size[1], size[1])]
    after = [zigzag(peers, count) for count in (size[0], size[1], size[1])]
    query, key, value = redealt((query, key, value), before, after, peers)
    ring = Ring(peers, after[0], after[1])
    out = ring_attention(query, key, value, None, Attention.of(**how), ring)
    return redealt((out,), after[:1], before[:1], peers)[0]


def _fits(part: Part) -> bool:
    return is_causal(part.node) and bool(split(part))


def _turns(part: Part) -> int:
    return part.ways(split(part))


def _sends(part: Part) -> Calls:
    axes, sizes, count = split(part), Sizes.of(part), _turns(part)
    into = collective("all_to_all", axes, sizes.query + sizes.pair)
    out = collective("all_to_all", axes, sizes.result)
    hop = collective("send", axes, sizes.pair)
    home = collective("send", axes, gradient_bytes(sizes))
    forward = (into, *(hop,) * (count - 1), out)
    return forward, (out, *(hop,) * (count - 1), *(home,) * count, into)


def _work(part: Part) -> NodeWork:
    """Returns the work of any device, which is half of the square."""
    return kernels(part, 0.5, _turns(part))


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of queries, keys and values in the other order, and of two blocks."""
    sizes = Sizes.of(part)
    dealt = sizes.query + sizes.pair + sizes.result
    scores = scores_bytes(part, -(-sizes.rows // 2), -(-sizes.keys // 2))
    blocks = 2.0 * sizes.pair
    return dealt + blocks + scores, dealt + blocks + 2.0 * gradient_bytes(sizes) + 2 * scores


NEEDS = (
    "a causal mask, a sequence that is split with two positions or more for each "
    "device, and no dropout"
)
FORM = Form(
    "ring zigzag",
    ATTENTION,
    specified(least=2),
    _fits,
    NEEDS,
    "zigzag_attention",
    _run,
    written,
    _sends,
    _work,
    _scratch,
    _turns,
    examples=(
        "f64[2, 2, 13, 3], f64[2, 2, 13, 3], f64[2, 2, 13, 2], None, 0.0, True",
        "f64[1, 4, 12, 2], f64[1, 2, 12, 2], f64[1, 2, 12, 2], None, 0.0, True, enable_gqa=True",
    ),
)

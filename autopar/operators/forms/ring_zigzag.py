"""Ring attention under a causal mask, balanced: each device has a part of the head and of the tail.

Outside attention the sequence remains contiguous: one call moves queries, keys and values into the
zigzag order, another moves the result back. Operators that depend on positions are not affected.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autopar.operators.attention.sequence_forms import (
    ATTENTION,
    Sizes,
    collective,
    gradient_bytes,
    groups,
    is_causal,
    kernels,
    scores_bytes,
    specified,
    split,
    with_sinks,
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
    sinks: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """Computes causal attention whose sequence is split, with equal work on each device."""
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.zigzag_attention import zigzag_attention

    peers = mesh.group(axis)
    return zigzag_attention(query, key, value, Attention.of(**how), peers, size, sinks)


def _fits(part: Part) -> bool:
    return is_causal(part.node) and bool(split(part))


def _turns(part: Part) -> int:
    return len(groups(part.ways(split(part))))


def _sends(part: Part) -> Calls:
    """Returns the calls into the order and out of it, which also carry blocks, and the hops."""
    axes, sizes = split(part), Sizes.of(part)
    owed = gradient_bytes(sizes)
    first, *later = (len(turns) for turns in groups(part.ways(axes)))
    into = collective("all_to_all", axes, sizes.query + first * sizes.pair)
    out = collective("all_to_all", axes, sizes.result)
    hops = tuple(collective("send", axes, count * sizes.pair) for count in later)
    back = [collective("all_to_all", axes, sizes.result + (first - 1) * sizes.pair)]
    ready = 0
    for before, count in pairwise((first, *later, 0)):
        if count or ready:
            back.append(collective("all_to_all", axes, count * sizes.pair + ready * owed))
        ready = before
    home = collective("all_to_all", axes, sizes.query + ready * owed)
    return (into, *hops, out), (*back, home)


def _work(part: Part) -> NodeWork:
    """Returns the work of any device, which is half of the square."""
    return kernels(part, 0.5, part.ways(split(part)))


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of queries and results in zigzag order, and of up to four blocks."""
    sizes, most = Sizes.of(part), max(map(len, groups(part.ways(split(part)))))
    dealt = sizes.query + sizes.result
    scores = scores_bytes(part, -(-sizes.rows // 2), -(-sizes.keys // 2))
    blocks = 2.0 * most * sizes.pair
    owed = 2.0 * most * gradient_bytes(sizes)
    return dealt + blocks + scores, 2 * dealt + blocks + owed + 2 * scores


NEEDS = (
    "a causal mask, a sequence that is split with two positions or more for each "
    "device, and no dropout"
)
FORMS = with_sinks(
    Form(
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
            "f64[1, 4, 12, 2], f64[1, 2, 12, 2], f64[1, 2, 12, 2], None, 0.0, True, "
            "enable_gqa=True",
            "bf16[1, 1, 9, 1], bf16[1, 1, 9, 1], bf16[1, 1, 9, 1], None, 0.0, True",
        ),
    )
)

"""Attention for which every device gathers all keys and values in one call, and again backwards.

A device saves only its own keys and values. One reduce_scatter sums and scatters their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.operators.attention.block_work import gathered_share, masks_of
from autopar.operators.attention.sequence_forms import (
    ATTENTION,
    Sizes,
    busiest_share,
    collective,
    gradient_bytes,
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
    mask: Tensor | None = None,
    *,
    axis: Axes,
    size: tuple[int, int],
    sinks: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """Attention whose sequence is split: all keys and values are gathered at once."""
    from autopar.operators.attention.gathered_attention import gathered_attention
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ring_attention import Ring

    peers = mesh.group(axis)
    ring = Ring.of_parts(peers, size)
    return gathered_attention(query, key, value, mask, Attention.of(**how), ring, sinks)


def _sends(part: Part) -> Calls:
    axes, sizes = split(part), Sizes.of(part)
    gather = collective("all_gather", axes, sizes.pair)
    scatter = collective("reduce_scatter", axes, gradient_bytes(sizes) * part.ways(axes))
    return (gather,), (gather, scatter)


def _work(part: Part) -> NodeWork:
    """Returns the work of the busiest device; the last one attends to nearly all keys if causal."""
    count, masks = part.ways(split(part)), masks_of(part)
    if masks:
        return kernels(part, gathered_share(masks, count))
    return kernels(part, busiest_share(part.node, Sizes.of(part).every, count))


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of all keys and values, and of their gradients."""
    sizes, count = Sizes.of(part), part.ways(split(part))
    scores = scores_bytes(part, sizes.rows, sizes.every)
    copies = 1.0 if sizes.every % count == 0 else 2.0  # equal parts are not copied
    whole = (copies * count + 1) * sizes.pair
    return whole + scores, whole + 2.0 * count * gradient_bytes(sizes) + 2 * scores


NEEDS = "a sequence of queries and keys that is split, and no dropout"
FORMS = with_sinks(
    Form(
        "gathered",
        ATTENTION,
        specified(),
        lambda part: bool(split(part)),
        NEEDS,
        "gathered_attention",
        _run,
        written,
        _sends,
        _work,
        _scratch,
    )
)

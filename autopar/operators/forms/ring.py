"""Ring attention: a device forwards blocks of keys and values while it computes on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.operators.attention.block_work import masks_of, ring_share
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
    """Attention whose sequence is split: n - 1 hops of keys and values around a ring."""
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ring_attention import Ring, ring_attention

    peers = mesh.group(axis)
    ring = Ring.of_parts(peers, size)
    return ring_attention(query, key, value, mask, Attention.of(**how), ring, sinks)


def _turns(part: Part) -> int:
    return part.ways(split(part))


def _sends(part: Part) -> Calls:
    axes, sizes, count = split(part), Sizes.of(part), _turns(part)
    hop = collective("send", axes, sizes.pair)
    home = collective("send", axes, gradient_bytes(sizes))
    return (hop,) * (count - 1), (hop,) * (count - 1) + (home,) * (count - 1)


def _work(part: Part) -> NodeWork:
    """Returns the work of the slowest device.

    Under a causal mask, all devices have half a block in the first turn, and in every further turn
    some device has a whole block, although all blocks together are half of the square. Under a mask
    of documents or a window, devices compute the blocks that the mask leaves.
    """
    count, masks = _turns(part), masks_of(part)
    if masks:
        share, turns = ring_share(masks, count)
        return kernels(part, share, round(turns))
    share = (count - 0.5) / count if is_causal(part.node) else 1.0
    return kernels(part, share, count)


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of two blocks, and backwards of their and of the device's own gradients."""
    sizes = Sizes.of(part)
    scores = scores_bytes(part, sizes.rows, sizes.keys)
    blocks = 2.0 * sizes.pair
    return blocks + scores, blocks + 3.0 * gradient_bytes(sizes) + 2 * scores


NEEDS = "a sequence of queries and keys that is split, and no dropout"
FORMS = with_sinks(
    Form(
        "ring",
        ATTENTION,
        specified(),
        lambda part: bool(split(part)),
        NEEDS,
        "ring_attention",
        _run,
        written,
        _sends,
        _work,
        _scratch,
        _turns,
        examples=(
            "f64[1, 2, 7, 3], f64[1, 2, 7, 3], f64[1, 2, 7, 2], None, 0.0, True",
            "f64[1, 2, 8, 2], f64[1, 1, 8, 2], f64[1, 1, 8, 3], f64[8, 8]",
            "f64[1, 4, 6, 2], f64[1, 2, 9, 2], f64[1, 2, 9, 2], bool[1, 1, 6, 9], enable_gqa=True",
            "f64[6, 2], f64[8, 2], f64[8, 3], None, 0.0, True",
        ),
    )
)

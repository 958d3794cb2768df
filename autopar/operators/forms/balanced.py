"""Attention under a mask of documents or windows, balanced by pairs of queries and keys.

A block of queries reads the range of keys to which its queries attend. Prices use what is known
about the mask before training, such as a window, and the lengths of documents if they are given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from autopar.ir.graph import Ref
from autopar.operators.attention.block_work import balanced_share, masks_of
from autopar.operators.attention.document_lengths import BLOCKS
from autopar.operators.attention.sequence_forms import (
    ATTENTION,
    Sizes,
    collective,
    gradient_bytes,
    kernels,
    mask_of,
    scores_bytes,
    seen,
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
    mask: Tensor,
    *,
    axis: Axes,
    size: tuple[int, int],
    sinks: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """Attention whose sequence is split, with equal work on each device."""
    from autopar.operators.attention.balanced_attention import balanced_attention
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ring_attention import Ring

    ring = Ring.of_parts(mesh.group(axis), size)
    return balanced_attention((query, key, value), mask, Attention.of(**how), ring, sinks)


def _fits(part: Part) -> bool:
    """Returns whether the sequence is split and a bool mask covers all queries and keys."""
    if not isinstance(mask_of(part.node), Ref) or not split(part):
        return False
    rows, keys = part.types[0].shape[-2], part.types[1].shape[-2]
    return part.types[3].dtype == "bool" and part.types[3].shape[-2:] == (rows, keys)


def _sends(part: Part) -> Calls:
    axes, sizes = split(part), Sizes.of(part)
    count = part.ways(axes)
    spans = collective("all_gather", axes, 16 * sizes.rows)
    into = collective("all_to_all", axes, sizes.query + part.operand(3).nbytes + count * sizes.pair)
    out = collective("all_to_all", axes, sizes.result)
    back = collective("all_to_all", axes, sizes.result + count * sizes.pair)
    home = collective("all_to_all", axes, sizes.query + count * gradient_bytes(sizes))
    return (spans, into, out), (back, home)


def _work(part: Part) -> NodeWork:
    """Returns the work of the busiest device's blocks, or of a block more than a query sees."""
    count, masks = part.ways(split(part)), masks_of(part)
    if masks:
        return kernels(part, balanced_share(masks, count))
    return kernels(part, min(1.0, seen(part.node) + 1.0 / (BLOCKS * count)))


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of all keys and values, of their gradients, and of exchanged queries."""
    sizes, count = Sizes.of(part), part.ways(split(part))
    scores = scores_bytes(part, sizes.rows, sizes.every)
    whole = 2.0 * count * sizes.pair + sizes.query + sizes.result
    masks = 2.0 * math.prod(part.operand(3).shape)
    return whole + masks + scores, whole + 2.0 * count * gradient_bytes(sizes) + 2 * scores


NEEDS = "a bool mask of all queries and keys, a sequence of both that is split, and no dropout"
FORMS = with_sinks(
    Form(
        "balanced",
        ATTENTION,
        specified(),
        _fits,
        NEEDS,
        "balanced_attention",
        _run,
        written,
        _sends,
        _work,
        _scratch,
        examples=(
            "f64[1, 2, 9, 3], f64[1, 2, 9, 3], f64[1, 2, 9, 2], bool[9, 9]",
            "f64[2, 4, 6, 2], f64[2, 2, 9, 2], f64[2, 2, 9, 2], bool[2, 1, 6, 9], enable_gqa=True",
        ),
    )
)

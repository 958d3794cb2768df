"""Ulysses: sequences are exchanged for heads before attention, and back after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.operators.attention.sequence_forms import (
    ATTENTION,
    Sizes,
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
    """Attention whose sequence is split: two exchanges of sequences for heads."""
    from autopar.operators.attention.partial_attention import Attention
    from autopar.operators.attention.ulysses_attention import ulysses_attention

    tensors, peers = (query, key, value), mesh.group(axis)
    return ulysses_attention(tensors, mask, Attention.of(**how), peers, None, size, sinks)


def _fits(part: Part) -> bool:
    return bool(split(part)) and enough_heads(part, split(part))


def _sends(part: Part) -> Calls:
    into, out = sends_for_heads(part, split(part))
    return (into, out), (out, into)


def _work(part: Part) -> NodeWork:
    """Returns attention of the device with the most heads, over all positions."""
    axes = split(part)
    return kernels(part, 0.5 if is_causal(part.node) else 1.0, more=heads_received(part, axes))


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of the exchanged tensors, and of their gradients."""
    sizes, (into, out) = Sizes.of(part), sends_for_heads(part, split(part))
    scores = scores_bytes(part, sizes.rows, sizes.every) * heads_received(part, split(part))
    dealt = float(into.nbytes + out.nbytes)
    return 2 * dealt + scores, 3 * dealt + 2 * scores


NEEDS = "a sequence that is split, a head of queries for each device along its axes, and no dropout"
FORMS = with_sinks(
    Form(
        "ulysses",
        ATTENTION,
        exchanged_spec,
        _fits,
        NEEDS,
        "ulysses_attention",
        _run,
        written,
        _sends,
        _work,
        _scratch,
        examples=(
            "f64[1, 5, 7, 3], f64[1, 5, 7, 3], f64[1, 5, 7, 2], None, 0.0, True",
            "f64[1, 6, 8, 2], f64[1, 2, 8, 2], f64[1, 2, 8, 2], f64[1, 6, 8, 8], enable_gqa=True",
            "f64[2, 4, 6, 2], f64[2, 1, 9, 2], f64[2, 1, 9, 3], bool[6, 9]",
        ),
    )
)

"""Attention with sinks: one more logit per head, which takes a share of the weights.

A sink adds exp(sink) to the denominator of a softmax (Xiao et al., "Efficient Streaming Language
Models with Attention Sinks", arXiv:2309.17453, section 3.3; gpt-oss learns one per head). So the
result is that without sinks times sigmoid(lse - sink), and log(exp(lse) + exp(sink)) takes the
place of the lse. Given both, the gradients of queries, keys and values are as without sinks, since
a sink has no value. Its own gradient is minus its weight times the product of the result and its
gradient. Fused kernels compute all but this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention.blocks import Block
from autopar.operators.attention.mask_blocks import visible
from autopar.operators.attention.part_sums import GradientSum, Result
from autopar.operators.attention.partial_attention import (
    Attention,
    partial_attention,
    partial_gradients,
)
from autopar.operators.peer_devices import widened


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns attention with sinks and its lse; overwrites both.

    Args:
        out, lse: attention of all keys, in at least float32, [..., heads, queries, width or 1].
        sinks: one logit per head; None for none.
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1, 1))
    return out.mul_((lse - total).exp()), lse.copy_(total)


def sink_gradients(sinks: Tensor | None, lse: Tensor, given: Tensor, out: Tensor) -> Tensor | None:
    """Returns the gradients of the sinks from these queries; None without sinks.

    Args:
        sinks: one logit per head; None for none.
        lse: the lse with sinks, [..., heads, queries, 1].
        given, out: gradient and result, [..., heads, queries, width].
    """
    if sinks is None:
        return None
    weights = (sinks.to(lse.dtype).view(-1, 1, 1) - lse).exp()
    owed = -weights * (widened(given) * widened(out)).sum(-1, keepdim=True)
    return owed.transpose(-3, 0).flatten(1).sum(1).to(sinks.dtype)


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    sinks: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns attention with sinks; arguments are those of torch's attention.

    Args:
        query, key, value: [batch, heads, positions, width].
        mask: bool, broadcast to [batch, heads, queries, keys]; None for none.
        sinks: one logit per head of the queries.
        is_causal, scale, enable_gqa: as in torch.
    """
    out: Tensor = _attention(query, key, value, mask, sinks, is_causal, scale, enable_gqa)[0]
    return out


# These are operators, because the blocks of a mask depend on its values, which a trace lacks.
@torch.library.custom_op("autopar::sink_attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> tuple[Tensor, Tensor]:
    """Returns attention in the dtype of the queries, and its lse."""
    how = Attention(scale, causal, grouped)
    parts = Result(query, key, value, how)
    for block in _blocks(query, key, mask, causal):
        own = replace(how, causal=block.kind == "causal")
        part = block.of(query, key, value)
        parts.add(block.rows, *partial_attention(*part, block.cut(mask), own, 0))
    out, lse = add_sinks(*parts.total(), sinks)
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


SINK_ATTENTION = torch.ops.autopar.sink_attention.default  # the operator that keeps its results


@torch.library.custom_op("autopar::sink_attention_gradients", mutates_args=())
def _gradients(
    given: Tensor,
    operands: list[Tensor],
    mask: Tensor | None,
    after: list[Tensor],
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> list[Tensor]:
    """Returns the gradients of queries, keys, values and sinks.

    Args:
        given: the gradient of the result.
        operands: queries, keys, values and sinks.
        mask: as in `sink_attention`.
        after: the result and its lse.
        causal, scale, grouped: options.
    """
    *tensors, sinks = operands
    (out, lse), how = after, Attention(scale, causal, grouped)
    sums = [GradientSum(x) for x in tensors]
    for block in _blocks(tensors[0], tensors[1], mask, causal):
        own = replace(how, causal=block.kind == "causal")
        near = [x.narrow(-2, *block.rows) for x in (lse, given, out)]
        found = partial_gradients(block.of(*tensors), block.cut(mask), own, 0, near)
        sums[0].add(block.rows, found.query)
        sums[1].add(block.columns, found.key)
        sums[2].add(block.columns, found.value)
    own_sinks = sink_gradients(sinks, lse, given, out)
    assert own_sinks is not None
    return [*(s.total().to(x.dtype) for s, x in zip(sums, tensors, strict=True)), own_sinks]


def _blocks(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> list[Block]:
    """Returns the blocks of queries and keys, under a mask or a causal mask.

    A mask is not read for one query, nor while a CUDA graph is captured, which would repeat its
    blocks.
    """
    rows, keys = query.shape[-2], key.shape[-2]
    if mask is not None and (
        rows == 1 or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return [Block((0, rows), (0, keys), "partial")]
    if mask is not None:
        return visible(mask, rows, keys)
    if not causal:
        return [Block((0, rows), (0, keys), "full")]
    square = min(rows, keys)
    blocks = [Block((0, square), (0, square), "causal")]
    if rows > keys:  # later queries attend to all keys
        blocks.append(Block((keys, rows - keys), (0, keys), "full"))
    return blocks


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows = query.shape[:3]
    out = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((batch, heads, rows, 1), dtype=wide)


@_gradients.register_fake
def _(given: Tensor, operands: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in operands]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, sinks, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, sinks, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, given: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *operands, mask, out, lse = ctx.saved_tensors
    query, key, value, sinks = _gradients(given, operands, mask, [out, lse], *ctx.options)
    return query, key, value, None, sinks, None, None, None


_attention.register_autograd(_backward, setup_context=_keep)

"""Attention over some of the keys, its gradient, and the merge of two such parts.

    lse = log sum exp(scale q k^T + mask),    out = exp(scale q k^T + mask - lse) v

Given the lse of each part, parts can be merged to the attention over all of their keys. Given the
merged lse and out, the gradient of each part depends on its own keys only (Dao, "FlashAttention-2",
arXiv:2307.08691, section 3.1; Liu et al., "Ring Attention", arXiv:2310.01889).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.operators.attention.fused_attention import fused, fused_gradients, fuses
from autopar.operators.peer_devices import widened


@dataclass(frozen=True)
class Attention:
    """Options of attention that hold for any part of the keys.

    Attributes:
        scale: factor of the products; None for 1 / sqrt(width of a head).
        causal: whether a query attends only to keys up to its own position.
        grouped: whether groups of query heads share a key head (grouped-query attention).
    """

    scale: float | None = None
    causal: bool = False
    grouped: bool = False

    @classmethod
    def of(
        cls, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
    ) -> Attention:
        """Returns the options that torch's keywords describe."""
        return cls(scale, is_causal, enable_gqa)

    def factor(self, query: Tensor) -> float:
        """Returns the factor of the products."""
        return 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale

    def repeated(self, keys: Tensor, query: Tensor) -> Tensor:
        """Returns keys or values with a head for each head of the queries."""
        if not self.grouped or keys.dim() < 3 or keys.shape[-3] == query.shape[-3]:
            return keys
        return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], -3)

    def summed(self, gradient: Tensor, like: Tensor) -> Tensor:
        """Returns a gradient of repeated, broadcast keys or values, summed to their shape."""
        if self.grouped and like.dim() > 2 and gradient.shape[-3] != like.shape[-3]:
            heads = like.shape[-3]
            gradient = gradient.unflatten(-3, (heads, gradient.shape[-3] // heads)).sum(-3)
        return gradient.sum_to_size(like.shape)


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    how: Attention,
    ahead: int,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns attention over some keys, in at least float32, and the lse of each query.

    Args:
        query: [..., heads, queries, width].
        key, value: [..., heads, keys, width].
        mask: bool or additive, broadcast to [..., heads, queries, keys]; None for none.
        how: options of attention.
        ahead: position of the first query minus that of the first key, for a causal mask.
        most: the numbers to subtract from masked scores, as in `row_maxima`; None for none.

    Returns:
        [..., heads, queries, width of values] and [..., heads, queries, 1]. A query without keys
        has lse -inf and result 0.
    """
    keys, values = how.repeated(key, query), how.repeated(value, query)
    if fuses(query, keys, values, ahead if how.causal else None, mask):
        out, lse = fused(query, keys, values, how.causal, how.factor(query), mask)
        return widened(out), lse
    scores = _scores(query, keys, (mask, most), how, ahead)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - _finite(lse)).exp()
    return weights @ widened(values), lse


def row_maxima(mask: Tensor | None) -> Tensor | None:
    """Returns the largest element of each row of an additive mask, [..., queries, 1].

    It is None without such a mask, or if all are small. If an element such as -1e9 hides all keys
    of a query, scores and lse have lost the digits that the number of keys changes. Subtracted from
    the masked scores, it leaves the weights, and the lse keeps these digits.
    """
    if mask is None or not mask.is_floating_point():
        return None
    most = mask.detach().amax(-1, keepdim=True)
    most = most.masked_fill(most.isinf(), 0)
    return most if most.is_cuda or bool((most.abs() > 1).any()) else None


def merge_into(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merges attention of the same queries over other keys into `out` and `lse`.

    Results of queries without keys are 0, as in `partial_attention`. On a GPU one kernel merges
    them, if it supports the strides of the operands.
    """
    if out.is_cuda and _merged_by_kernel(out, lse, more, more_lse):
        return
    total = torch.logaddexp(lse, more_lse)
    out.lerp_(more, (more_lse - _finite(total)).exp())
    lse.copy_(total)


def _merged_by_kernel(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> bool:
    """Merges with the kernel for (batch, row, head, width); returns whether it supports these."""
    if out.dim() != 4:
        return False
    # Importing the kernels takes a second, and few programs have a ring.
    kernel = importlib.import_module("autopar_kernels.registry").operators()["attention_merge_"]
    total = lse.squeeze(-1).contiguous()
    operands = (
        out.transpose(1, 2), total, more.transpose(1, 2), more_lse.squeeze(-1).contiguous(),
    )  # fmt: skip
    if kernel.unfit(operands):
        return False
    kernel.run(*operands)
    lse.copy_(total.unsqueeze(-1))
    return True


@dataclass(frozen=True)
class Gradients:
    """Gradients of one part of attention; `mask` is None without an additive mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


def partial_gradients(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    how: Attention,
    ahead: int,
    after: Sequence[Tensor],
    most: Tensor | None = None,
) -> Gradients:
    """Returns the contributions of some keys to the gradients, in at least float32.

    Args:
        tensors: query, key and value, as in `partial_attention`.
        mask, how, ahead, most: as in `partial_attention`.
        after: lse of the queries over all keys, [..., heads, queries, 1], the gradient of the
            result, and the result.
    """
    query, key, value = tensors
    lse, given, out = after
    keys, values = how.repeated(key, query), how.repeated(value, query)
    factor = how.factor(query)
    if fuses(query, keys, values, ahead if how.causal else None, mask):
        after = given, out, _finite(lse)
        found = fused_gradients((query, keys, values), after, how.causal, factor, mask)
        into, into_key, into_value = map(widened, found)
        return Gradients(into, how.summed(into_key, key), how.summed(into_value, value), None)
    keys, values, given = widened(keys), widened(values), widened(given)
    delta = (given * out).sum(-1, keepdim=True)
    weights = (_scores(query, keys, (mask, most), how, ahead) - _finite(lse)).exp()
    scores = weights * (given @ values.mT - delta)
    additive = mask is not None and mask.is_floating_point()
    return Gradients(
        (scores @ keys * factor).sum_to_size(query.shape),
        how.summed(scores.mT @ widened(query) * factor, key),
        how.summed(weights.mT @ given, value),
        scores.sum_to_size(mask.shape) if additive and mask is not None else None,
    )


def _scores(
    query: Tensor,
    key: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    how: Attention,
    ahead: int,
) -> Tensor:
    mask, most = masks
    scores = widened(query) @ widened(key).mT * how.factor(query)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if most is not None:
        scores = scores - most
    if how.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(ahead)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _finite(lse: Tensor) -> Tensor:
    """Returns lse with 0 for queries without keys, so that their exponentials are 0."""
    return lse.masked_fill(lse == -torch.inf, 0)

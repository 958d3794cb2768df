"""Torch's fused attention kernels over some of the keys, with each query's log-sum-exp (lse).

`F.scaled_dot_product_attention` chooses among these kernels. It does not return the lse, which is
needed to merge parts, and its backward does not take the lse over all keys, which is needed for the
gradient of one part. The operators that it calls do both.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


def fuses(
    query: Tensor, key: Tensor, value: Tensor, ahead: int | None, mask: Tensor | None = None
) -> bool:
    """Returns whether a kernel accepts such operands.

    Args:
        query, key, value: [batch, heads, positions, width].
        ahead: position of the first query minus that of the first key, under a causal mask; None
            without a causal mask.
        mask: a further mask, broadcast to [batch, heads, queries, keys]; None for none.
    """
    same = {x.shape[-1] for x in (query, key, value)} == {query.shape[-1]}
    leads = {x.shape[:-2] for x in (query, key, value)} == {query.shape[:-2]}
    if query.dim() != 4 or not (same and leads) or ahead not in (None, 0):
        return False
    if (ahead == 0 and query.shape[-2] != key.shape[-2]) or 0 in (*query.shape, *key.shape):
        return False
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        return False
    if mask is not None:
        shape = *query.shape[:-1], key.shape[-2]
        near = zip(reversed(mask.shape), reversed(shape), strict=False)
        broadcast = mask.dim() <= len(shape) and all(size in (1, whole) for size, whole in near)
        if mask.dtype != torch.bool or not (query.is_cpu and broadcast and ahead is None):
            return False
    if query.device.type == "cpu":
        return query.is_floating_point()
    return query.is_cuda and query.dtype in _HALVES and query.shape[-1] % 8 == 0


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns attention, for which `fuses` must hold, and its lse [batch, heads, queries, 1].

    A query without keys has lse -inf and result 0.
    """
    operators = torch.ops.aten
    if query.is_cpu:
        kernel = operators._scaled_dot_product_flash_attention_for_cpu
        bias = _bias(mask, query, key)
        out, lse = kernel(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        lse = lse.unsqueeze(-1)
        if mask is None:
            return out, lse
        return out, lse.masked_fill(~mask.any(-1, keepdim=True), -torch.inf)  # torch writes 0
    kernel = operators._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(query, key, value, 0.0, causal, scale=scale)
    return out, lse.unsqueeze(-1)


def fused_gradients(
    tensors: tuple[Tensor, Tensor, Tensor],
    after: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the contributions of these keys to the gradients of queries, keys and values.

    Args:
        tensors: query, key and value, as in `fused`.
        after: the gradient of the result, in the dtype of the queries, the result, and its finite
            lse over all keys, [batch, heads, queries, 1].
        causal, scale, mask: as in `fused`.
    """
    query, key, value = tensors
    operators, lse = torch.ops.aten, after[2].squeeze(-1).contiguous()
    given, out = (x if x.stride(-1) == 1 else x.contiguous() for x in after[:2])
    operands = given, query, key, value, out, lse
    if query.is_cpu:
        kernel = operators._scaled_dot_product_flash_attention_for_cpu_backward
        bias = _bias(mask, query, key)
        found = kernel(*operands, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused, without dropout
        sizes = None, None, query.shape[-2], key.shape[-2]
        kernel = operators._scaled_dot_product_flash_attention_backward
        found = kernel(*operands, *sizes, 0.0, causal, seed, seed[:0], scale=scale)
    gradients: tuple[Tensor, Tensor, Tensor] = found
    return gradients


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Returns a bool mask as numbers that are added to the scores."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    return bias.expand(*query.shape[:-1], key.shape[-2])

"""Torch's fused attention kernels over some of the keys, with each query's log-sum-exp (lse).

`F.scaled_dot_product_attention` chooses among these kernels. It does not return the lse, which is
needed to merge parts, and its backward does not take the lse over all keys, which is needed for the
gradient of one part. The operators that it calls do both.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


def fuses(query: Tensor, key: Tensor, value: Tensor, ahead: int | None) -> bool:
    """Returns whether a kernel accepts such operands, without a mask.

    Args:
        query, key, value: [batch, heads, positions, width].
        ahead: position of the first query minus that of the first key, under a causal mask; None
            without a causal mask.
    """
    same = {x.shape[-1] for x in (query, key, value)} == {query.shape[-1]}
    leads = {x.shape[:-2] for x in (query, key, value)} == {query.shape[:-2]}
    if query.dim() != 4 or not (same and leads) or ahead not in (None, 0):
        return False
    if (ahead == 0 and query.shape[-2] != key.shape[-2]) or 0 in (*query.shape, *key.shape):
        return False
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        return False
    if query.device.type == "cpu":
        return query.is_floating_point()
    return query.is_cuda and query.dtype in _HALVES and query.shape[-1] % 8 == 0


def fused(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns attention, for which `fuses` must hold, and its lse [batch, heads, queries, 1]."""
    operators = torch.ops.aten
    if query.device.type == "cpu":
        kernel = operators._scaled_dot_product_flash_attention_for_cpu
    else:
        kernel = operators._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(query, key, value, 0.0, causal, scale=scale)
    return out, lse.unsqueeze(-1)


def fused_gradients(
    tensors: tuple[Tensor, Tensor, Tensor],
    given: Tensor,
    whole: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the contributions of these keys to the gradients of queries, keys and values.

    Args:
        tensors: query, key and value, as in `fused`.
        given: the gradient of the result, in the dtype of the queries.
        whole: the result and its lse over all keys, [batch, heads, queries, 1].
        causal, scale: as in `fused`.
    """
    query, key, value = tensors
    operators, lse = torch.ops.aten, whole[1].squeeze(-1).contiguous()
    given, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (given, whole[0]))
    operands = given, query, key, value, out, lse
    if query.device.type == "cpu":
        kernel = operators._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(*operands, 0.0, causal, scale=scale)
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused, without dropout
        sizes = None, None, query.shape[-2], key.shape[-2]
        kernel = operators._scaled_dot_product_flash_attention_backward
        found = kernel(*operands, *sizes, 0.0, causal, seed, seed[:0], scale=scale)
    gradients: tuple[Tensor, Tensor, Tensor] = found
    return gradients

"""What a block keeps whose activations are computed again in the backward.

hidden = checkpoint(h_block, mesh, p, i, hidden, use_reentrant=False, context_fn=keep_products)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
# The kernels below what `autopar.ir.recompute.PRODUCTS` names.
PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a block's forward and its repetition: products and attention run once."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
        create_selective_checkpoint_contexts(_policy)
    )
    return contexts


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operator in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE

"""Blocks whose activations are computed again in the backward: what they keep, what they write.

hidden = checkpoint(h_block, mesh, p, i, hidden, use_reentrant=False, context_fn=keep_products)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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


def repeatable(
    block: Callable[..., Any], p: Mapping[str, Tensor], names: Sequence[str]
) -> Callable[..., Any]:
    """A block that computes the same and writes nothing when it is run again.

    A block may read or write buffers that a step changes, such as a batch norm's running
    statistics. The repetition gets copies of what its first run found.

    Args:
        block: takes the mesh, the parameters and buffers by name, and more.
        p: parameters and buffers as they are before the first run.
        names: the buffers that change.
    """
    before = {name: p[name].clone() for name in names}
    repetitions = itertools.count()

    def run(mesh: Any, p: Mapping[str, Tensor], *arguments: Any) -> Any:
        if next(repetitions):
            p = {**p, **{name: value.clone() for name, value in before.items()}}
        return block(mesh, p, *arguments)

    return run


class _OfProducts(TorchDispatchMode):
    """One of torch's two contexts, which sees products and attention only.

    It compares the operators of a block with those of its repetition, and parameters that are on
    their way meanwhile are another block's in each.
    """

    def __init__(self, context: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own have it."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What the operator gives, now or in the forward."""
        given: Mapping[str, Any] = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **given)
        return self._context.__torch_dispatch__(func, types, args, given)


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a block's forward and its repetition: products and attention run once."""
    first, again = create_selective_checkpoint_contexts(_policy)
    return _OfProducts(first), _OfProducts(again)


def _policy(_context: Any, _operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE

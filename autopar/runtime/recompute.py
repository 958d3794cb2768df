"""Support for blocks that recompute their activations in the backward.

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
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# The kernels of the operators in `autopar.ir.recompute.PRODUCTS`.
PRODUCTS = (
    aten.mm.default,
    aten._scaled_mm.default,
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
    """Returns a block whose recomputation gives the same results and writes nothing.

    A block may read or write buffers that a step changes, such as a batch norm's running
    statistics. The recomputation gets copies of their values before the first run.

    Args:
        block: takes the mesh, the parameters and buffers by name, and more.
        p: parameters and buffers before the first run.
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
    """Restricts one of torch's two contexts to products and attention.

    torch compares the operators of a block with those of its recomputation; parameters of other
    blocks that are gathered meanwhile differ between the two.
    """

    def __init__(self, context: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns the same as torch's own contexts."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Returns the operator's result, computed now or saved in the forward."""
        given: Mapping[str, Any] = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **given)
        return self._context.__torch_dispatch__(func, types, args, given)


def keep_products() -> Contexts:
    """Returns contexts for a block and its recomputation that run products and attention once."""
    return _contexts(lambda _again: True)


def keeping(*kept: bool) -> Callable[[], Contexts]:
    """Returns what makes contexts for a block whose products are run once where `kept` says so.

    Args:
        *kept: for each product and attention of the block, in order.
    """

    def contexts() -> Contexts:
        left = {again: iter(kept) for again in (False, True)}
        return _contexts(lambda again: next(left[again]))

    return contexts


def _contexts(keeps: Callable[[bool], bool]) -> Contexts:
    def policy(context: Any, _operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if keeps(context.is_recompute):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return _OfProducts(first), _OfProducts(again)

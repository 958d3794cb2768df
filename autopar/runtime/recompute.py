"""Support for blocks that recompute their activations in the backward.

hidden = checkpoint(h_block, mesh, p, i, hidden, use_reentrant=False, context_fn=keep_products)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autopar.operators.attention.sink_attention import SINK_ATTENTION
from autopar.operators.sharded_operators import ShardedOperators

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
    SINK_ATTENTION,
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


@dataclass
class _Results:
    """Results of the products and attention of a block, in order, by operator.

    Attributes:
        keeps: whether the next product is kept; it is asked once for each, in the first run.
        of: the results of each operator; None where it is computed again.
    """

    keeps: Callable[[], bool]
    of: dict[Any, list[Any]] = field(default_factory=dict)


class _First(TorchDispatchMode):
    """The context of a block's first run: keeps results of products and attention.

    Only of those, since other operators may differ between the two runs: those that gather
    parameters of other blocks meanwhile. torch's own contexts compare all operators, and give each
    result once. The halves of a split backward recompute a block twice.
    """

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns the same as torch's own contexts."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Returns the operator's result, and keeps it if it is a product that is kept."""
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            kept = tree_map(_own(), out) if self._results.keeps() else None
            self._results.of.setdefault(func, []).append(kept)
        return out


class _Again(TorchDispatchMode):
    """The context of a block's recomputation: gives the results that the first run kept."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results, self._count = results, Counter[Any]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns the same as torch's own contexts."""
        return True

    def __enter__(self) -> Self:
        self._count.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Returns the operator's result, computed now or kept in the first run."""
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        number = self._count[func]
        self._count[func] += 1
        kept = self._results.of[func][number]
        if kept is None:
            return func(*args, **(kwargs or {}))
        return tree_map(_own(), kept)


def _own() -> Callable[[Any], Any]:
    """Returns a function from a result to one that the block does not change.

    Functions with a backward of their own, which run without recording gradients, overwrite
    results: forms of attention merge parts into that of the first kernel, and linears add biases.
    """
    return _detached if torch.is_grad_enabled() else _copied


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def keep_products() -> Contexts:
    """Returns contexts for a block and its recomputation that run products and attention once."""
    return _contexts(lambda: True)


def keeping(*kept: bool, mesh: ShardedOperators | None = None) -> Callable[[], Contexts]:
    """Returns a function that creates contexts for a block whose `kept` products run only once.

    Args:
        *kept: for each product and attention of the block, in order.
        mesh: the object whose methods run forms, each of which counts as one, although it may call
            several kernels; None if the block has no forms.
    """

    def contexts() -> Contexts:
        left = iter(kept)
        last: tuple[object, bool] = None, False  # the last form that ran, and whether it is kept

        def keeps() -> bool:
            nonlocal last
            running = None if mesh is None else mesh.running
            if running is None or running is not last[0]:
                last = running, next(left)
            return last[1]

        return _contexts(keeps)

    return contexts


def _contexts(keeps: Callable[[], bool]) -> Contexts:
    results = _Results(keeps)
    return _First(results), _Again(results)

"""Decomposes composite operators, which torch defines by other operators.

torch.export keeps such operators whole, which is right for linear or attention. An unknown operator
is better replaced by its known parts: `kron`, `vstack`, the cell of an LSTM, a triplet loss.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

# The only way to trace above autograd, as torch.export does; the public function traces below
# autograd, where operators have no gradients.
from torch.fx.experimental.proxy_tensor import make_fx

_IMPLICIT = "CompositeImplicitAutograd"


def is_composite(node: fx.Node, known: Container[str]) -> bool:
    """Returns whether a traced operator is unknown and composite for autograd and all devices."""
    target = node.target
    if not isinstance(target, OpOverload) or str(target).removesuffix(".default") in known:
        return False
    if torch.Tag.inplace_view in target.tags:
        return False  # it is the view that it takes
    return has_kernel(target, _IMPLICIT)


def has_kernel(operator: OpOverload, key: str) -> bool:
    """Returns whether torch has a kernel of an operator for one of its dispatcher's keys."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def parts(node: fx.Node, flows: Sequence[bool]) -> fx.Graph:
    """Returns the parts of a composite operator, as a graph of `node.all_input_nodes`.

    The parts have the source of `node`.

    Args:
        node: the traced operator.
        flows: for each of these inputs, whether a gradient flows through it; some operators
            decompose differently without gradients.
    """
    target: Any = node.target
    inputs = node.all_input_nodes

    def call(*tensors: Tensor) -> Any:
        values = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return target(*args, **kwargs)

    # The table names only this operator, so that its parts stay whole.
    trace = make_fx(call, decomposition_table={target: target.decompose}, pre_dispatch=True)
    values = (item.meta["val"].detach() for item in inputs)
    graph = trace(*(v.requires_grad_(f) for v, f in zip(values, flows, strict=True))).graph
    for operator in _operators(graph):
        for key in ("stack_trace", "nn_module_stack"):
            operator.meta[key] = node.meta.get(key)
    return graph


def _operators(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")

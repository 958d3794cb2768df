"""Traces an operator and its backward as one graph of torch operators."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.lowering import Lowering
from autopar.errors import CaptureError
from autopar.ir.graph import Graph, Node
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import TORCH_DTYPES, execute
from autopar.operators.own_functions import Joint


def joint(
    node: Node, types: tuple[TensorType, ...], wants: tuple[bool, ...], known: Container[str]
) -> Joint | None:
    """Returns the operators that `node` runs in both directions; None if it needs values.

    Args:
        node: an operator that torch differentiates.
        types: types of its operands.
        wants: for each operand, whether its gradient is needed.
        known: operators that are kept; others are decomposed where torch defines them by others.
    """
    numbers = dict(enumerate(node.inputs))
    flows: list[bool] = []
    used: list[bool] = []

    def call(*given: Tensor) -> list[Tensor]:
        operands = [x.detach().requires_grad_(w) for x, w in zip(given, wants, strict=False)]
        values = {name: operands[i] for i, name in numbers.items()}
        with torch.enable_grad():
            value = execute(node, values, torch.device("cpu"))
        results = list(value) if isinstance(value, (tuple, list)) else [value]
        flows[:] = [x.requires_grad for x in results]
        output_gradients = [g for g, flow in zip(given[len(wants) :], flows, strict=True) if flow]
        taking = [x for x in operands if x.requires_grad]
        if output_gradients and taking:
            flowing = [x for x, flow in zip(results, flows, strict=True) if flow]
            gradients = torch.autograd.grad(flowing, taking, output_gradients, allow_unused=True)
            used[:] = [gradient is not None for gradient in gradients]
            results += [gradient for gradient in gradients if gradient is not None]
        return [x.detach() for x in results]

    table: dict[Any, Any] = {
        op: f for op, f in decomposition_table.items() if _name(op) not in known
    }
    with FakeTensorMode():
        fakes = [torch.empty(t.shape, dtype=TORCH_DTYPES[t.dtype]) for t in (*types, *node.types)]
        try:
            traced = make_fx(call, decomposition_table=table)(*fakes).graph
        except Exception:  # user code, which may read values
            return None
    lowering = Lowering(known)
    leaves = [item for item in traced.nodes if item.op == "placeholder"]
    for at, leaf in enumerate(leaves):
        lowering.leaf(leaf, "input", f"{at}")
    try:
        lowering.run(traced)
        output: Any = traced.output_node().args[0]
        values = [lowering.read(item).name for item in output]
    except CaptureError:
        return None
    names = [lowering.read(leaf).name for leaf in leaves]
    count, backwards = len(types), iter(values[len(node.types) :])
    taken = iter(used)
    return Joint(
        Graph("joint", tuple(sorted(lowering.nodes, key=lambda n: not n.is_leaf)), ()),
        tuple(names[:count]),
        tuple(values[: len(node.types)]),
        tuple(n if f else "" for n, f in zip(names[count:], flows, strict=True)),
        tuple(next(backwards) if w and next(taken, False) else "" for w in wants),
    )


def _name(op: Any) -> str:
    return str(op).removesuffix(".default")

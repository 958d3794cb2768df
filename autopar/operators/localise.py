"""Localises operators: shape arguments become those of one device's part.

Nearly every operator runs on shards with its global arguments, since it takes sizes from its
operands. Operators with explicit sizes (reshape, expand, full) need local sizes, and operators that
reduce or index a split dimension communicate (see exchange.py). Code generation prints the
localised nodes, and the proofs of the rules run them, so the emitted code is what is proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import Arg, Node
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.exchange import local_steps

# Operator -> index of the argument with the shape of the result.
SHAPE_ARGUMENT = {
    "aten.view": 1,
    "aten.reshape": 1,
    "aten.expand": 1,
    "aten.new_empty": 1,
    "aten.new_full": 1,
    "aten.new_ones": 1,
    "aten.new_zeros": 1,
    "aten.empty.memory_format": 0,
    "aten.full": 0,
    "aten.ones": 0,
    "aten.zeros": 0,
}


def localise(
    node: Node,
    types: tuple[TensorType, ...],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    extent: Callable[[int, tuple[str, ...]], Arg],
    form: str = "",
) -> tuple[Node, ...]:
    """Returns `node` as one device runs it.

    Args:
        node: an operator with global shapes.
        types, operands: global types and layouts of its operands.
        results: the layouts of its results.
        extent: returns the local size of a dimension, given its size and the axes that split it: a
            number, or a symbol if the size differs between devices.
        form: name of its implementation; "" for the operator itself.

    Returns:
        The steps, nearly always one; the last one has the results. Their `types` stay global.
    """
    steps = local_steps(node, types, operands, form)
    if steps:
        return steps
    at = SHAPE_ARGUMENT.get(node.op)
    if at is None or not results[0].sharded_axes:
        return (node,)
    shape = tuple(
        extent(size, axes) if axes else size
        for size, axes in zip(node.type.shape, results[0].dims, strict=True)
    )
    return (replace(node, args=(*node.args[:at], shape, *node.args[at + 1 :])),)

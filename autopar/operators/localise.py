"""An operator as one device runs it: shape arguments become those of the local part.

Nearly every operator runs on local parts with the arguments of the whole: sizes are read off the
operands. Those that are told a size (reshape, expand, full) must be told the local one, and those
that look into a split dimension ask the other devices (see exchange.py). Code generation prints the
localised nodes and the proofs of the rules run them, so that what is proved is what is emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import Arg, Node
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.exchange import across

# Operator -> position of the argument that holds the shape of the result.
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
) -> tuple[Node, ...]:
    """`node` as one device runs it.

    Args:
        node: an operator with global shapes.
        types, operands: global types and layouts of what it reads.
        results: the layouts of its results.
        extent: how many of a dimension's elements a device holds if these axes split it: a number,
            or a symbol for one where devices hold different numbers.

    Returns:
        The steps, nearly always one, the last of which gives the results. Their `types` stay
        global.
    """
    steps = across(node, types, operands)
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

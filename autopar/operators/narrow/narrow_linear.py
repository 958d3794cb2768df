"""Linears in 8 bits as plans see them: their call on one device, and its messages.

Under `linears=float8` or `float8-rows` a linear of a block is one call of `mesh.float8_linear`; see
`float8_linear.py`. Where devices hold parts of a tensor, or of its rows, they exchange the largest
elements, from which the scales follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ProgramError
from autopar.ir.collective import Collective
from autopar.ir.graph import Arg, Node
from autopar.operators.form import Calls, Kwargs, Layouts, Part

LINEAR = "aten.linear"
BY_ROW = {"float8": False, "float8-rows": True}  # formats that run; whether a row has a scale
_SCALE = 4  # bytes


def is_narrow(node: Node) -> bool:
    """Returns whether an operator is a linear that runs in 8 bits."""
    return node.op == LINEAR and node.part.narrow in BY_ROW


def check_runs(node: Node) -> None:
    """Raises ProgramError for a linear in a format that only prices know."""
    if node.part.narrow and not is_narrow(node):
        raise ProgramError(
            f"no program multiplies in {node.part.narrow}",
            where=str(node.source),
            why="plans and prices alone know this format, for systems that have it",
            todo=f"pass linears={' or linears='.join(BY_ROW)}",
        )


def narrow_scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of operands in 8 bits, forwards and backwards."""
    x, weight = part.operand(0).numel, part.operand(1).numel
    result = math.prod(part.operand(0).shape[:-1]) * part.operand(1).shape[0]
    return float(x + weight), float(result + max(x, weight))


def call(node: Node, operands: Layouts) -> Node:
    """Returns a linear in 8 bits as one device runs it."""
    by_row: Kwargs = (("by_row", True),) if BY_ROW[node.part.narrow] else ()
    names = ("rows", "columns", "contracted")
    split = zip(names, _axes(operands), strict=True)
    axes: Kwargs = tuple((name, _one(given)) for name, given in split if given)
    return replace(node, op="mesh.float8_linear", kwargs=(*node.kwargs, *by_row, *axes))


def messages(part: Part) -> Calls:
    """Returns the exchanges of largest elements, forwards and backwards.

    For scales of tensors: of x, of the weight, and of the gradient of the result. For scales of
    rows: of both operands of each product whose contracted elements are split.
    """
    rows, columns, contracted = _axes(part.operands)
    x, weight = part.operand(0), part.operand(1)
    (n, k), m = weight.shape, math.prod(x.shape[:-1])
    if not BY_ROW[part.node.part.narrow]:
        of_x = [(rows + contracted, 1)] if part.node.part.casts else []
        return _exchanges([*of_x, (columns + contracted, 1)]), _exchanges([(rows + columns, 1)])
    forward = [(contracted, m), (contracted, n)]
    return _exchanges(forward), _exchanges([(columns, m), (columns, k), (rows, n), (rows, k)])


def _exchanges(scales: Sequence[tuple[tuple[str, ...], int]]) -> tuple[Collective, ...]:
    return tuple(Collective("all_reduce", axes, _SCALE * n) for axes, n in scales if axes and n)


def _axes(operands: Layouts) -> tuple[tuple[str, ...], ...]:
    """Returns the axes that split the rows of x, the columns of the result, and what is summed."""
    x, weight = operands[:2]
    return tuple(axis for dim in x.dims[:-1] for axis in dim), weight.dims[0], weight.dims[1]


def _one(axes: tuple[str, ...]) -> Arg:
    return axes[0] if len(axes) == 1 else axes

"""Sends tokens of a mixture to their experts in one hop, over all axes that split both.

This needs fewer calls than a hop for each axis, but a token crosses the outer axes once for each
receiving device, not once for each receiving node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.ir.graph import Arg, Node
from autopar.operators.dispatch import dispatch_messages
from autopar.operators.expert_load import PRICED
from autopar.operators.form import Calls, Form, Kwargs, Layouts, Part, Types
from autopar.operators.mixture import MIXTURE, by_name, dispatch_axes, factors

if TYPE_CHECKING:
    from torch import Tensor


def _run(mesh: Any, *operands: Any, **how: Any) -> Tensor:
    """Computes a mixture whose tokens take one hop."""
    result: Tensor = mesh.mixture(*operands, **how)
    return result


def _write(node: Node, types: Types, operands: Layouts) -> tuple[tuple[Arg, ...], Kwargs]:
    up = by_name(node, range(len(types)))["up"]
    kept = tuple(pair for pair in node.kwargs if pair[0] not in PRICED)
    axes = operands[up].dims[0]
    own: Kwargs = (
        ("axis", axes), ("size", types[up].shape[0]), ("over", dispatch_axes(node, operands)),
    )  # fmt: skip
    return node.args, (*kept, *own)


def _sends(part: Part) -> Calls:
    return dispatch_messages(part, (dispatch_axes(part.node, part.operands),))


FORM = Form(
    "dispatch direct",
    MIXTURE,
    lambda node, types: factors(node),
    lambda part: len(dispatch_axes(part.node, part.operands)) > 1,
    "tokens and experts that two axes or more split",
    "mixture_direct",
    _run,
    _write,
    _sends,
    together="e ...",
)

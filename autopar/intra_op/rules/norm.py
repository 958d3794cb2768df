"""Normalisations: what the statistics run over stays whole."""

from __future__ import annotations

from autopar.intra_op.rule import rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def _over_trailing(node: Node, types: tuple[TensorType, ...]) -> str:
    """layer_norm and rms_norm: `normalized_shape` trailing dimensions are whole."""
    shape = node.args[1]
    count = len(shape) if isinstance(shape, tuple) else 1
    tail = " ".join(f"n{i}!" for i in range(count))
    return f"... {tail}, {tail}, {tail} -> ... {tail}"


def _over_one(node: Node, types: tuple[TensorType, ...]) -> str:
    """softmax and log_softmax: the dimension named by the second argument is whole."""
    rank = len(types[0].shape)
    dim = node.args[1]
    at = dim % rank if isinstance(dim, int) else rank - 1
    names = " ".join(f"d{i}!" if i == at else f"d{i}" for i in range(rank))
    return f"{names} -> {names}"


RULES = (
    rule("aten.layer_norm", _over_trailing, flops="8 ... n0"),
    rule("aten.rms_norm", _over_trailing, flops="6 ... n0"),
    rule("aten.softmax.int", _over_one),
    rule("aten.log_softmax.int", _over_one),
)

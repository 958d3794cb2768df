"""Tensor creation: a constant fill can be split anywhere, a count stays whole."""

from __future__ import annotations

from autopar.intra_op.rule import all_whole, letters, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def _filled(node: Node, types: tuple[TensorType, ...]) -> str:
    """Ignores the values of the operand, if any; only its dtype and device are read."""
    like = ", ".join(" ".join(f"t{i}!" for i in range(len(t.shape))) for t in types)
    return f"{like} -> {' '.join(letters(len(node.type.shape)))}"


_FILLS = {
    "zeros": "(4, 6)",
    "ones": "(4, 6), dtype=i64",
    "full": "(4, 6), 2.5",
    "empty.memory_format": "(4, 6)",
    "scalar_tensor": "2.5, dtype=f64",
    "new_zeros": "f64[2], (4, 6)",
    "new_ones": "f64[2], (4, 6), dtype=bool",
    "new_full": "f64[2], (4, 6), 2.5",
    "new_empty": "f64[2], (4, 6)",
}
_LIKE = {"zeros_like": "", "ones_like": "", "full_like": ", 2.5", "empty_like": ""}
_COUNTS = {
    "arange": "6",
    "arange.start": "1, 7",
    "arange.start_step": "0, 6, 2",
    "eye": "4",
    "eye.m": "4, 6",
    "linspace": "0, 1, 6",
    "logspace": "0, 1, 6",
    "tril_indices": "4, 4",
    "triu_indices": "4, 4",
}
RULES = (
    *(rule(f"aten.{op}", _filled, examples=(example,)) for op, example in _FILLS.items()),
    *(rule(f"aten.{op}", "... -> ...", examples=(f"f64[4, 6]{x}",)) for op, x in _LIKE.items()),
    *(rule(f"aten.{op}", all_whole, examples=(example,)) for op, example in _COUNTS.items()),
)

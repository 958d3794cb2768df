"""Writes into buffers, whole on every device so that all devices hold the same buffer.

A cache of a program that generates may be split; it is written where it lies.
"""

from __future__ import annotations

from autopar.intra_op.rule import all_whole, letters, rule
from autopar.ir.graph import CACHE, WRITE, Node
from autopar.ir.tensor import TensorType


def _write(node: Node, types: tuple[TensorType, ...]) -> str:
    if node.keyword(CACHE) is not True:
        return all_whole(node, types)
    term = " ".join(letters(len(node.type.shape)))
    return f"{term}, {term} -> {term}"


RULES = (rule(WRITE, _write, examples=("i64[4, 6], i64[4, 6]",)),)

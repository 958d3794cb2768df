"""Views: dimensions move, split and merge; no arithmetic, so sums pass through."""

from __future__ import annotations

import math

from autopar.intra_op.rule import rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def reshape_spec(src: tuple[int, ...], dst: tuple[int, ...]) -> str:
    """The rule of a reshape: dimensions are cut into the coarsest factors both sides share.

    Runs of dimensions with equal products are matched from the left; inside a run with one
    dimension on one side, that dimension is the group of the other side's. Runs that share no such
    structure stay whole.
    """
    left: list[str] = []
    right: list[str] = []
    i = j = number = 0
    while i < len(src) or j < len(dst):
        a, b = i, j
        product_a = src[i] if i < len(src) else 1
        product_b = dst[j] if j < len(dst) else 1
        i, j = min(i + 1, len(src)), min(j + 1, len(dst))
        while product_a != product_b:
            if product_a < product_b and i < len(src):
                product_a, i = product_a * src[i], i + 1
            elif j < len(dst):
                product_b, j = product_b * dst[j], j + 1
            else:
                break
        run_a, run_b = src[a:i], dst[b:j]
        names = [f"f{number + k}" for k in range(max(len(run_a), len(run_b)))]
        number += len(names)
        left += _side(run_a, run_b, names)
        right += _side(run_b, run_a, names)
    return f"{' '.join(left)} -> {' '.join(right)}"


def _side(mine: tuple[int, ...], other: tuple[int, ...], names: list[str]) -> list[str]:
    if math.prod(mine) == 1:
        return ["1"] * len(mine)
    if len(mine) == 1 and len(other) > 1:
        return [f"({' '.join(n if s > 1 else '1' for n, s in zip(names, other, strict=True))})"]
    if len(other) == 1 or len(mine) == 1:
        return [n if s > 1 else "1" for n, s in zip(names, mine, strict=False)]
    return [f"{n}{'l' if mine < other else 'r'}!" for n in names[: len(mine)]]


def _reshape(node: Node, types: tuple[TensorType, ...]) -> str:
    return reshape_spec(types[0].shape, node.type.shape)


def _letters(types: tuple[TensorType, ...]) -> list[str]:
    return [f"d{i}" for i in range(len(types[0].shape))]


def _transpose(node: Node, types: tuple[TensorType, ...]) -> str:
    names = _letters(types)
    moved = list(names)
    a, b = (int(str(arg)) % len(names) for arg in node.args[1:3])
    moved[a], moved[b] = names[b], names[a]
    return f"{' '.join(names)} -> {' '.join(moved)}"


def _permute(node: Node, types: tuple[TensorType, ...]) -> str:
    names = _letters(types)
    order = node.args[1]
    assert isinstance(order, tuple)
    return f"{' '.join(names)} -> {' '.join(names[int(str(i)) % len(names)] for i in order)}"


def _unsqueeze(node: Node, types: tuple[TensorType, ...]) -> str:
    names = _letters(types)
    at = int(str(node.args[1])) % (len(names) + 1)
    return f"{' '.join(names)} -> {' '.join([*names[:at], '1', *names[at:]])}"


def _expand(node: Node, types: tuple[TensorType, ...]) -> str:
    """New and widened dimensions are factors that the operand lacks."""
    src, dst = types[0].shape, node.type.shape
    padded = (1,) * (len(dst) - len(src)) + src
    names = [f"d{i}" for i in range(len(dst))]
    kept = [n if s > 1 else "1" for n, s in zip(names, padded, strict=True)][-len(src) :]
    return f"{' '.join(kept if src else [])} -> {' '.join(names)}"


def _along(node: Node, types: tuple[TensorType, ...]) -> str:
    """slice, select: the dimension that is cut stays whole."""
    names = _letters(types)
    dim = int(str(node.args[1])) % len(names) if len(node.args) > 1 else 0
    left = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    if node.op == "aten.select.int":
        right = [n for i, n in enumerate(names) if i != dim]
    else:
        right = ["cut!" if i == dim else n for i, n in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(right)}"


def _cat(node: Node, types: tuple[TensorType, ...]) -> str:
    """The dimension that is joined stays whole."""
    rank = len(types[0].shape)
    dim = int(str(node.args[1])) % rank if len(node.args) > 1 else 0
    terms = [
        " ".join(f"c{k}!" if i == dim else f"d{i}" for i in range(rank))
        for k in range(len(types) + 1)
    ]
    return f"{', '.join(terms[:-1])} -> {terms[-1]}"


RULES = (
    *(
        rule(op, _reshape, linear=True)
        for op in ("aten.view", "aten.reshape", "aten.flatten.using_ints", "aten.squeeze.dim")
    ),
    rule("aten.transpose.int", _transpose, linear=True),
    rule("aten.permute", _permute, linear=True),
    rule("aten.unsqueeze", _unsqueeze, linear=True),
    rule("aten.expand", _expand, linear=True),
    rule("aten.slice.Tensor", _along, linear=True),
    rule("aten.select.int", _along, linear=True),
    rule("aten.cat", _cat, linear=True),
)

"""Matrix products: a split contracted factor gives a partial sum."""

from __future__ import annotations

import re

from autopar.intra_op.rule import all_whole, argument, broadcast, dimensions, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def _matmul(node: Node, types: tuple[TensorType, ...]) -> str:
    """Vectors, matrices, and stacks of matrices that broadcast against one another."""
    left, right = (len(tensor.shape) for tensor in types)
    terms = ["k" if left == 1 else "... m k", "k" if right == 1 else "... k n"]
    out = ["..."] * (max(left, right) > 1) + ["m"] * (left > 1) + ["n"] * (right > 1)
    return f"{', '.join(terms)} -> {' '.join(out)}"


def _linear(node: Node, types: tuple[TensorType, ...]) -> str:
    """Also handles a vector as weight, and a bias that does not broadcast like a row."""
    x, weight, *bias = types
    if len(weight.shape) == 2 and all(added.shape == weight.shape[:1] for added in bias):
        return "... k, n k, +n -> ... n"
    rows, columns = [f"m{i}" for i in range(len(x.shape) - 1)], ["n"] * (len(weight.shape) - 1)
    out = [*rows, *columns]
    terms = [" ".join([*rows, "k"]), " ".join([*columns, "k"])]
    terms += [f"+{broadcast(out, added)}" for added in bias]
    return f"{', '.join(terms)} -> {' '.join(out)}"


def _addmm(node: Node, types: tuple[TensorType, ...]) -> str:
    return f"+{broadcast(['m', 'n'], types[0])}, m k, k n -> m n"


def _baddbmm(node: Node, types: tuple[TensorType, ...]) -> str:
    return f"+{broadcast(['b', 'm', 'n'], types[0])}, b m k, b k n -> b m n"


def _addbmm(node: Node, types: tuple[TensorType, ...]) -> str:
    return f"+{broadcast(['m', 'n'], types[0])}, b m k, b k n -> m n"


def _addmv(node: Node, types: tuple[TensorType, ...]) -> str:
    return f"+{broadcast(['m'], types[0])}, m k, k -> m"


def _addr(node: Node, types: tuple[TensorType, ...]) -> str:
    return f"{broadcast(['m', 'n'], types[0])}, m, n -> m n"


def _inner(node: Node, types: tuple[TensorType, ...]) -> str:
    """Contracts the last dimensions."""
    if not all(tensor.shape for tensor in types):
        return "..., ... -> ..."
    left, right = (
        [f"{x}{i}" for i in range(len(t.shape) - 1)] for x, t in zip("mn", types, strict=True)
    )
    return f"{' '.join([*left, 'k'])}, {' '.join([*right, 'k'])} -> {' '.join([*left, *right])}"


def _tensordot(node: Node, types: tuple[TensorType, ...]) -> str:
    names = [[f"{x}{i}" for i in range(len(t.shape))] for x, t in zip("mn", types, strict=True)]
    dims = [dimensions(arg, len(own)) for arg, own in zip(node.args[2:4], names, strict=True)]
    for k, (a, b) in enumerate(zip(*dims, strict=True)):
        names[0][a] = names[1][b] = f"k{k}"
    out = [name for own in names for name in own if not name.startswith("k")]
    left = ", ".join(broadcast(own, tensor) for own, tensor in zip(names, types, strict=True))
    return f"{left} -> {' '.join(out)}"


def _einsum(node: Node, types: tuple[TensorType, ...]) -> str:
    """Uses the equation as the rule, if every index is a letter that occurs once in each operand.

    Without an arrow the result has the letters that occur once in total, in alphabetical order.
    """
    equation = str(argument(node, 0, "equation")).replace(" ", "")
    inputs, arrow, right = equation.partition("->")
    if not arrow:
        right = "".join(sorted(c for c in set(inputs) if c != "," and inputs.count(c) == 1))
    terms = [*inputs.split(","), right]
    if "." in equation or any(len(set(term)) < len(term) for term in terms):
        return all_whole(node, types)
    left = ", ".join(broadcast(list(term), t) for term, t in zip(terms, types, strict=False))
    return f"{left} -> {' '.join(right)}"


def _einsum_flops(node: Node, types: tuple[TensorType, ...]) -> str:
    return "2 " + " ".join(sorted(set(re.findall(r"[A-Za-z]\w*", _einsum(node, types)))))


RULES = (
    rule(
        "aten.linear",
        _linear,
        flops="2 out k",
        examples=(
            "f64[4, 6, 8], f64[12, 8], f64[12]",
            "f64[4, 6], f64[8, 6]",
            "f64[6, 6], f64[6, 6]",
            "f64[4, 6], f64[8, 6], f64[4, 8]",
            "f64[4, 6], f64[8, 6], f64[]",
            "f64[4, 6, 8], f64[8]",
        ),
    ),
    rule(
        "aten.mm",
        "m k, k n -> m n",
        flops="2 out k",
        examples=("f64[4, 6], f64[6, 8]", "f64[6, 6], f64[6, 6]"),
    ),
    rule("aten.mv", "m k, k -> m", flops="2 out k", examples=("f64[4, 6], f64[6]",)),
    rule("aten.dot", "k, k ->", flops="2 out k", examples=("f64[6], f64[6]",)),
    rule(
        "aten.addmm",
        _addmm,
        flops="2 out k",
        examples=("f64[8], f64[4, 6], f64[6, 8]", "f64[4, 1], f64[4, 6], f64[6, 8], beta=2"),
    ),
    rule(
        "aten.bmm",
        "b m k, b k n -> b m n",
        flops="2 out k",
        examples=("f64[4, 4, 6], f64[4, 6, 2]", "f64[4, 6, 6], f64[4, 6, 6]"),
    ),
    rule(
        "aten.baddbmm",
        _baddbmm,
        flops="2 out k",
        examples=("f64[4, 1, 2], f64[4, 4, 6], f64[4, 6, 2]",),
    ),
    rule(
        "aten.matmul",
        _matmul,
        flops="2 out k",
        examples=(
            "f64[4, 2, 6], f64[6, 8]",
            "f64[2, 4, 2, 6], f64[4, 6, 2]",
            "f64[4, 1, 2, 6], f64[2, 6, 4]",
            "f64[6, 6], f64[6, 6]",
            "f64[4, 6], f64[6]",
            "f64[6], f64[4, 6, 8]",
            "f64[6], f64[6]",
        ),
    ),
    rule("aten.vdot", "k, k ->", flops="2 out k", examples=("f64[6], f64[6]",)),
    rule("aten.addmv", _addmv, flops="2 out k", examples=("f64[4], f64[4, 6], f64[6], beta=2",)),
    rule(
        "aten.addr",
        _addr,
        flops="2 out",
        examples=("f64[6], f64[4], f64[6]", "f64[4, 6], f64[4], f64[6]"),
    ),
    rule(
        "aten.addbmm",
        _addbmm,
        flops="2 out b k",
        examples=("f64[4, 1], f64[2, 4, 6], f64[2, 6, 2]",),
    ),
    rule("aten.inner", _inner, examples=("f64[2, 4, 6], f64[4, 6]", "f64[6], f64[6]")),
    rule(
        "aten.tensordot",
        _tensordot,
        examples=(
            "f64[4, 6, 2], f64[2, 6, 4], (1, 2), (1, 0)",
            "f64[4, 1, 2], f64[2, 6, 4], (1, 2), (1, 0)",
        ),
    ),
    rule(
        "aten.bilinear",
        "... i, ... j, o i j, +o -> ... o",
        flops="2 out i j",
        examples=(
            "f64[4, 6], f64[4, 2], f64[8, 6, 2], f64[8]",
            "f64[4, 2, 6], f64[4, 2, 2], f64[8, 6, 2]",
        ),
    ),
    rule("aten.outer", "m, n -> m n", examples=("f64[4], f64[6]", "f64[6], f64[6]")),
    rule(
        "aten.einsum",
        _einsum,
        flops=_einsum_flops,
        examples=(
            "'bij,bjk->bik', (f64[2, 4, 6], f64[2, 6, 4])",
            "'bhd,hdk->bk', (f64[4, 6, 2], f64[6, 2, 4])",
            "'bij,bjk->ik', (f64[4, 2, 6], f64[1, 6, 2])",
            "'kj,ji', (f64[4, 6], f64[6, 8])",
            "'ii', (f64[4, 4],)",
        ),
    ),
)

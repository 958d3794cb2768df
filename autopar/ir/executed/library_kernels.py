"""Operators that libraries run: products of matrices, convolutions, sorts.

A compiler makes kernels of the operators between them. Names are those of ATen without namespace
and overload.
"""

from __future__ import annotations

# Matrix products: indices of the multiplied operands.
MULTIPLIED = {
    "linear": (0, 1), "matmul": (0, 1), "mm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1),
    "bmm": (0, 1), "inner": (0, 1), "tensordot": (0, 1), "einsum": (0, 1), "addmm": (1, 2),
    "baddbmm": (1, 2), "addbmm": (1, 2), "addmv": (1, 2),
}  # fmt: skip
CONVOLUTIONS = tuple(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
SORTS = ("sort", "argsort", "topk", "kthvalue", "median")
_OTHERS = ("scaled_dot_product_attention", "embedding", "cross_entropy_loss")


def base(op: str) -> str:
    """Returns an operator's name without namespace and overload: "aten.add.Tensor" -> "add"."""
    return op.removeprefix("aten.").split(".")[0]


def is_library(name: str, operands: int) -> bool:
    """Returns whether a library runs an operator of this name and number of operands.

    An einsum of three operands or more is written as a product of numbers.
    """
    if name == "einsum":
        return operands == 2
    return name in MULTIPLIED or name in CONVOLUTIONS or name in SORTS or name in _OTHERS

"""Reductions: a sum over a split dimension is a partial sum; devices exchange maxima and minima.

All other reductions keep the reduced dimensions whole.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import all_whole, argument, dimensions, letters, rule, whole_along
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType

_Spec = Callable[[Node, tuple[TensorType, ...]], str]


def _over(position: int, mark: str, default: int | None = None) -> _Spec:
    """Returns a rule over the dimensions in argument `position`, else `default`, else all."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        names = letters(len(types[0].shape))
        dims = dimensions(argument(node, position, "dim", default), len(names))
        left = [n + mark if i in dims else n for i, n in enumerate(names)]
        kept = len(node.type.shape) == len(names)
        right = ["1" if i in dims else n for i, n in enumerate(names) if kept or i not in dims]
        return f"{' '.join(left)} -> {', '.join([' '.join(right)] * len(node.types))}"

    return spec


def _compared(position: int) -> _Spec:
    """Like `_over`; an index into the flattened tensor names no dimension."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        flat = node.op in ("aten.argmax", "aten.argmin") and argument(node, position, "dim") is None
        return _over(position, "!" if flat else "~")(node, types)

    return spec


def _along(position: int) -> _Spec:
    """Returns the rule of cumulative sums and sorting, which keep the dimension whole."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        dim = argument(node, position, "dim", -1)
        return whole_along(node, types, dimensions(dim, len(types[0].shape)))

    return spec


_X = "f64[4, 6, 8]"
_DIMS = (f"{_X}, (1,)", f"{_X}, (0, -1), True")
_DIM = (f"{_X}, 1", f"{_X}, -1, True")
_ALL = (_X,)
# Operator -> (position of its dimensions, examples); devices compare results along split ones.
_COMPARED: dict[str, tuple[int, tuple[str, ...]]] = {
    "amax": (1, _DIMS),
    "amin": (1, (*_DIMS, "i64[4, 6], (1,)")),
    "logsumexp": (1, _DIMS),
    "max.dim": (1, _DIM),
    "min.dim": (1, _DIM),
    "argmax": (1, (*_DIM, _X)),
    "argmin": (1, _DIM),
    "max": (1, _ALL),
    "min": (1, _ALL),
}
# The same, for operators that keep the reduced dimensions whole.
_WHOLE: dict[str, tuple[int, tuple[str, ...]]] = {
    "mean.dim": (1, _DIMS),
    "any.dim": (1, ("bool[4, 6], 1",)),
    "any.dims": (1, ("bool[4, 6], (1,)",)),
    "all.dim": (1, ("bool[4, 6], 1",)),
    "prod.dim_int": (1, _DIM),
    "var.correction": (1, (f"{_X}, (1,), correction=1, keepdim=True",)),
    "std.correction": (1, (f"{_X}, (1,), correction=1",)),
    "var.dim": (1, (f"{_X}, (1,)",)),
    "linalg_vector_norm": (2, (f"{_X}, 2, (1,), True",)),
    "median.dim": (1, _DIM),
    "nanmedian.dim": (1, _DIM),
    "all.dims": (1, ("bool[4, 6], (1,)",)),
    "std.dim": (1, (f"{_X}, (1,)",)),
    "var_mean.correction": (1, (f"{_X}, (1,), correction=1, keepdim=True", f"{_X}, (0, 2)")),
    "std_mean.correction": (1, (f"{_X}, (1,), correction=1",)),
    "aminmax": (1, (f"{_X}, dim=1", f"{_X}, dim=-1, keepdim=True", "f64[2, 3]")),
    "nanmean": (1, _DIMS),
    "linalg_norm": (2, (f"{_X}, None, (1,), True",)),
    "quantile.scalar": (2, (f"{_X}, 0.5, 1", f"{_X}, 0.25, -1, True")),
    "nanquantile.scalar": (2, (f"{_X}, 0.5, 1",)),
    "norm.ScalarOpt_dim": (2, (f"{_X}, 2, (1,), True",)),
}
_ALONG: dict[str, tuple[int, tuple[str, ...]]] = {
    "cumsum": (1, (f"{_X}, 1",)),
    "cumprod": (1, (f"{_X}, 1",)),
    "logcumsumexp": (1, (f"{_X}, 1",)),
    "cummax": (1, (f"{_X}, 1",)),
    "cummin": (1, (f"{_X}, 1",)),
    "sort.stable": (1, (f"{_X}, stable=True, dim=1", f"{_X}, stable=True")),
    "sort": (1, (f"{_X}, 1", _X)),
    "argsort": (1, (f"{_X}, 1",)),
    "topk": (2, (f"{_X}, 2, 1", f"{_X}, 2")),
}
# These reduce the last dimension by default.
_LAST: dict[str, tuple[int, tuple[str, ...]]] = {
    "mode": (1, ("f64[4, 6]", f"{_X}, 1, True")),
    "kthvalue": (2, (f"{_X}, 2", f"{_X}, 2, 1, True")),
}
_TOTAL = ("mean", "any", "all", "var", "std", "median", "nanmedian", "norm.Scalar")


def _renorm(node: Node, types: tuple[TensorType, ...]) -> str:
    """Keeps whole all dimensions but `dim`, whose slices have their norm bounded."""
    rank = len(types[0].shape)
    kept = dimensions(argument(node, 2, "dim"), rank)
    return whole_along(node, types, tuple(i for i in range(rank) if i not in kept))


def _histogram(node: Node, types: tuple[TensorType, ...]) -> str:
    """Counts of parts add up, if the bounds are given rather than taken from the data."""
    low, high = (argument(node, i, name, 0) for i, name in ((2, "min"), (3, "max")))
    return (
        f"{'...' if low != high else ' '.join(f'd{i}!' for i in range(len(types[0].shape)))} -> k!"
    )


def _search(node: Node, types: tuple[TensorType, ...]) -> str:
    """searchsorted: rows of values in rows of sorted numbers, or any values in one row.

    A sorter operand is as long as the numbers.
    """
    if len(types[0].shape) == 1:
        return "k!, ..., k! -> ..."
    return "... k!, ... n, ... k! -> ... n"


RULES = (
    rule("aten.sum", _over(1, ""), linear=True, examples=(*_ALL, "bool[4, 6]", "f64[]")),
    rule("aten.sum.dim_IntList", _over(1, ""), linear=True, examples=(*_DIMS, f"{_X}, None")),
    *(
        rule(f"aten.{op}", _compared(position), examples=examples)
        for op, (position, examples) in _COMPARED.items()
    ),
    *(
        rule(f"aten.{op}", _over(position, "!"), linear=op == "mean.dim", examples=examples)
        for op, (position, examples) in _WHOLE.items()
    ),
    *(
        rule(f"aten.{op}", _along(position), linear=op == "cumsum", examples=examples)
        for op, (position, examples) in _ALONG.items()
    ),
    *(
        rule(f"aten.{op}", _over(position, "!", -1), examples=examples)
        for op, (position, examples) in _LAST.items()
    ),
    *(rule(f"aten.{op}", all_whole, examples=_ALL) for op in _TOTAL),
    *(rule(f"aten._is_{op}_true", all_whole, examples=("bool[4, 6]",)) for op in ("all", "any")),
    rule("aten.nansum", _over(1, ""), examples=(*_DIMS, _X)),
    rule("aten.count_nonzero.dim_IntList", _over(1, ""), examples=("i64[4, 6], (1,)",)),
    rule("aten.count_nonzero", _over(1, ""), examples=("i64[4, 6], 1", "i64[4, 6]")),
    rule("aten.dist", all_whole, examples=("f64[4, 6], f64[6]",)),
    rule("aten.renorm", _renorm, examples=(f"{_X}, 2, 1, 1.0",)),
    rule("aten.histc", _histogram, examples=("const f64[4, 6], 4, -1, 1", "const f64[4, 6], 4")),
    rule(
        "aten.searchsorted.Tensor",
        _search,
        examples=(
            "f64[6], f64[4, 6]",
            "f64[4, 6], f64[4, 2]",
            "f64[4, 6], f64[4, 2], sorter=i64[4, 6]<6",
        ),
    ),
    rule("aten.bucketize.Tensor", "..., k! -> ...", examples=("f64[4, 6], f64[6]",)),
    rule("aten.prod", all_whole, examples=("f64[2, 3]",)),
)

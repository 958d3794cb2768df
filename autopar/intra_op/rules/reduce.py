"""Reductions: a sum over a split dimension is a partial sum, all others run over whole ones."""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import all_whole, argument, dimensions, letters, rule, whole_along
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType

_Spec = Callable[[Node, tuple[TensorType, ...]], str]


def _over(position: int, mark: str) -> _Spec:
    """Over the dimensions named by argument number `position`, all if there is none."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        names = letters(len(types[0].shape))
        dims = dimensions(argument(node, position, "dim"), len(names))
        left = [n + mark if i in dims else n for i, n in enumerate(names)]
        kept = len(node.type.shape) == len(names)
        right = ["1" if i in dims else n for i, n in enumerate(names) if kept or i not in dims]
        return f"{' '.join(left)} -> {', '.join([' '.join(right)] * len(node.types))}"

    return spec


def _along(position: int) -> _Spec:
    """Cumulative sums, sorting: the dimension is kept, and whole."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        dim = argument(node, position, "dim", -1)
        return whole_along(node, types, dimensions(dim, len(types[0].shape)))

    return spec


_X = "f64[4, 6, 8]"
_DIMS = (f"{_X}, (1,)", f"{_X}, (0, -1), True")
_DIM = (f"{_X}, 1", f"{_X}, -1, True")
_ALL = (_X,)
# Operator -> (position of its dimensions, examples); what it runs over stays whole.
_WHOLE: dict[str, tuple[int, tuple[str, ...]]] = {
    "mean.dim": (1, _DIMS),
    "amax": (1, _DIMS),
    "amin": (1, _DIMS),
    "logsumexp": (1, _DIMS),
    "max.dim": (1, _DIM),
    "min.dim": (1, _DIM),
    "argmax": (1, (*_DIM, _X)),
    "argmin": (1, _DIM),
    "any.dim": (1, ("bool[4, 6], 1",)),
    "any.dims": (1, ("bool[4, 6], (1,)",)),
    "all.dim": (1, ("bool[4, 6], 1",)),
    "prod.dim_int": (1, _DIM),
    "var.correction": (1, (f"{_X}, (1,), correction=1, keepdim=True",)),
    "std.correction": (1, (f"{_X}, (1,), correction=1",)),
    "var.dim": (1, (f"{_X}, (1,)",)),
    "linalg_vector_norm": (2, (f"{_X}, 2, (1,), True",)),
    "norm.ScalarOpt_dim": (2, (f"{_X}, 2, (1,), True",)),
}
_ALONG: dict[str, tuple[int, tuple[str, ...]]] = {
    "cumsum": (1, (f"{_X}, 1",)),
    "cumprod": (1, (f"{_X}, 1",)),
    "logcumsumexp": (1, (f"{_X}, 1",)),
    "sort": (1, (f"{_X}, 1", _X)),
    "argsort": (1, (f"{_X}, 1",)),
    "topk": (2, (f"{_X}, 2, 1", f"{_X}, 2")),
}
_TOTAL = ("mean", "max", "min", "any", "all", "var", "std")
RULES = (
    rule("aten.sum", _over(1, ""), linear=True, examples=(*_ALL, "bool[4, 6]", "f64[]")),
    rule("aten.sum.dim_IntList", _over(1, ""), linear=True, examples=(*_DIMS, f"{_X}, None")),
    *(
        rule(f"aten.{op}", _over(position, "!"), linear=op == "mean.dim", examples=examples)
        for op, (position, examples) in _WHOLE.items()
    ),
    *(
        rule(f"aten.{op}", _along(position), linear=op == "cumsum", examples=examples)
        for op, (position, examples) in _ALONG.items()
    ),
    *(rule(f"aten.{op}", all_whole, examples=_ALL) for op in _TOTAL),
    rule("aten.prod", all_whole, examples=("f64[2, 3]",)),
)

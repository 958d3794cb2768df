"""Fourier transforms and complex numbers: transformed dimensions stay whole."""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import argument, dimensions, rule, whole_along
from autopar.ir.graph import Arg, Node
from autopar.ir.tensor import TensorType

Types = tuple[TensorType, ...]


def _over(position: int, default: Arg) -> Callable[[Node, Types], str]:
    """Returns the rule of a transform of the dimensions in argument `position`; None means all."""

    def spec(node: Node, types: Types) -> str:
        dims = argument(node, position, "dim", default)
        return whole_along(node, types, dimensions(dims, len(types[0].shape)))

    return spec


_X, _Z = "f64[4, 6, 6]", "c128[4, 6, 6]"
_LINES = {"fft": _X, "ifft": _Z, "rfft": _X, "irfft": _Z, "hfft": _Z, "ihfft": _X}
_KERNELS = {
    "c2c": f"{_Z}, (1, 2), 0, True",
    "c2r": f"{_Z}, (2,), 0, 10",
    "r2c": f"{_X}, (2,), 0, True",
}
_LAST, _PLANE = -1, (-2, -1)
RULES = (
    *(
        rule(f"aten.fft_{op}", _over(2, _LAST), linear=True, examples=(x, f"{x}, 6, 1"))
        for op, x in _LINES.items()
    ),
    *(
        rule(f"aten.fft_{op}2", _over(2, _PLANE), linear=True, examples=(x, f"{x}, None, (0, 1)"))
        for op, x in _LINES.items()
        if "h" not in op
    ),
    *(
        rule(f"aten.fft_{op}n", _over(2, None), linear=True, examples=(x, f"{x}, None, (1,)"))
        for op, x in _LINES.items()
        if "h" not in op
    ),
    *(
        rule(f"aten.fft_{op}shift", _over(1, None), linear=True, examples=(f"{_X}, (1,)",))
        for op in ("fft", "ifft")
    ),
    *(
        rule(f"aten._fft_{op}", _over(1, None), linear=True, examples=(example,))
        for op, example in _KERNELS.items()
    ),
    rule("aten.view_as_complex", "... k! -> ...", linear=True, examples=("f64[4, 6, 2]",)),
    rule("aten.view_as_real", "... -> ... k!", linear=True, examples=("c128[4, 6]",)),
    *(
        rule(f"aten.{op}", "... -> ...", linear=True, examples=("c128[4, 6]",))
        for op in ("real", "imag", "conj", "_conj", "_conj_physical", "resolve_conj")
    ),
    rule("aten.complex", "..., ... -> ...", linear=True, examples=("f64[4, 6], f64[6]",)),
    rule("aten.polar", "..., ... -> ...", examples=("f64[4, 6], f64[6]",)),
    rule("aten.angle", "... -> ...", examples=("c128[4, 6]", "f64[4, 6]")),
)

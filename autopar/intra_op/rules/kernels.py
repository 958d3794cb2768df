"""Fused kernels that replace several operators of a model (see `autopar/ir/fusion/`).

Factors and FLOPs repeat those in the kernels' own files, because importing these files would import
Triton wherever rules are used.
"""

from __future__ import annotations

from autopar.intra_op.rule import rule
from autopar.ir.graph import PREFIX

_X, _N = "f64[4, 6, 8]", "f64[8]"
_ANGLES = "const f64[3, 4], const f64[3, 4]"
RULES = (
    rule(
        f"{PREFIX}rms_norm",
        "... n!, n! -> ... n!, ...",
        flops="4 ... n",
        examples=(f"{_X}, {_N}, 0.3",),
    ),
    rule(
        f"{PREFIX}add_rms_norm",
        "... n!, ... n!, n! -> ... n!, ... n!, ...",
        flops="5 ... n",
        examples=(f"{_X}, {_X}, {_N}, 0.3",),
    ),
    rule(
        f"{PREFIX}add_layer_norm",
        "... n!, ... n!, n!, n! -> ... n!, ... n!, ..., ...",
        flops="8 ... n",
        examples=(f"{_X}, {_X}, {_N}, {_N}, 0.3",),
    ),
    *(
        rule(f"{PREFIX}{name}", "..., ... -> ...", flops="7 ...", examples=(f"{_X}, {_X}",))
        for name in ("swiglu", "geglu")
    ),
    rule(f"{PREFIX}gelu", "... -> ...", flops="8 ...", examples=(_X,)),
    rule(
        f"{PREFIX}rotary",
        "b s h d!, s a!, s a! -> b s h d!",
        flops="3 b s h d",
        examples=(f"f64[2, 3, 2, 8], {_ANGLES}",),
    ),
    rule(
        # Here rows may span several dimensions; the kernel sees them flattened.
        f"{PREFIX}linear_cross_entropy",
        "... k!, v~ k!, ... ->",
        flops="6 ... v k",
        examples=(
            "f64[4, 3], f64[6, 3], i64[4]<6, -100",
            "f64[2, 4, 3], f64[7, 3], i64[2, 4]<7, 1",
        ),
    ),
)

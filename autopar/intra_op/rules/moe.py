"""Mixtures of experts: split by tokens, by experts, or within every expert."""

from __future__ import annotations

from autopar.intra_op.rule import rule
from autopar.operators.mixture import GROUPED

_EXPERTS = "f64[4, 6, 3], f64[4, 6, 3], f64[4, 3, 6]"
RULES = (
    # Any token may use any expert: a device with some experts, or a part of each, computes a part
    # of every token's sum.
    rule(
        "autopar.mixture",
        "e f d!, e f d!, e d! f, ... d!, ... k!, ... k! -> ... d!",
        flops="6 ... k f d",
        together="e ...",  # tokens travel to their experts
        examples=(
            f"{_EXPERTS}, f64[8, 3], i64[8, 2]<4, f64[8, 2], 'silu'",
            f"{_EXPERTS}, f64[4, 2, 3], i64[4, 2, 2]<3, f64[4, 2, 2], 'gelu'",
        ),
    ),
    # Rows are sorted by expert, so all rows and experts must be on every device.
    rule(
        "aten._grouped_mm",
        "s! k, e! k n, e! -> s! n",
        flops="2 out k",
        examples=("f32[5, 48], f32[2, 48, 48], i32[2]<6",),
    ),
    rule(
        GROUPED,
        "s! k, e! n k, e! -> s! n",
        flops="2 out k",
        examples=("f64[5, 4], f64[2, 6, 4], i32[2]<6",),
    ),
)

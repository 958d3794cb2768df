"""Mixtures of experts: split by tokens, by experts, or within every expert."""

from __future__ import annotations

from autopar.intra_op.rule import rule
from autopar.operators.mixture import GROUPED, factors

_EXPERTS = "f64[4, 6, 3], f64[4, 6, 3], f64[4, 3, 6]"
RULES = (
    # Any token may use any expert: a device with some experts, or a part of each, computes a part
    # of every token's sum.
    rule(
        "autopar.mixture",
        lambda node, types: factors(node),
        flops=lambda node, types: f"{2 * (2 + (node.args[0] is not None))} ... k f d",
        together="e ...",  # tokens are sent to their experts
        examples=(
            f"{_EXPERTS}, f64[8, 3], i64[8, 2]<4, f64[8, 2], 'silu'",
            f"{_EXPERTS}, f64[4, 2, 3], i64[4, 2, 2]<3, f64[4, 2, 2], 'gelu'",
            f"{_EXPERTS}, f64[8, 3], i64[8, 2]<4, f64[8, 2], "
            "'mul(add(clamp(up, -1.0, 1.0), 1), sigmoid(gate))', f64[4, 6], f64[4, 6], f64[4, 3]",
            "None, f64[4, 6, 3], f64[4, 3, 6], f64[6, 3], i64[6, 2]<4, f64[6, 2], "
            "'square(relu(up))', None, None, f64[4, 3]",
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

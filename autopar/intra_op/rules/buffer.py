"""Writing into buffers: whole, so that every device holds the same buffer afterwards."""

from __future__ import annotations

from autopar.intra_op.rule import all_whole, rule

RULES = (
    *(
        rule(f"aten.{op}", all_whole, examples=("i64[4, 6], i64[6]",))
        for op in ("add_.Tensor", "copy_", "mul_.Tensor", "sub_.Tensor")
    ),
    *(rule(f"aten.{op}", all_whole, examples=("i64[4, 6]",)) for op in ("detach_", "zero_")),
)

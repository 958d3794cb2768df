"""Matrix products: the contracted factor gives a partial sum.

Capture writes a matmul of two batched operands as aten.bmm; aten.matmul has a plain matrix on the
right.
"""

from __future__ import annotations

from autopar.intra_op.rule import rule

RULES = (
    rule("aten.linear", "... k, n k, +n -> ... n", flops="2 ... n k"),
    rule("aten.mm", "m k, k n -> m n", flops="2 m k n"),
    rule("aten.addmm", "+n, m k, k n -> m n", flops="2 m k n"),
    rule("aten.bmm", "b m k, b k n -> b m n", flops="2 b m k n"),
    rule("aten.matmul", "... k, k n -> ... n", flops="2 ... k n"),
)

"""The kernels' factor strings are rules: proved as autopar proves its own."""

from __future__ import annotations

import pytest

from autopar.intra_op.proofs.prove import prove
from autopar.intra_op.rule import rule
from autopar_kernels.registry import operators, register
from autopar_kernels.registry.operator import Operator

register()
# Those with a "~" ask other devices for something, which is the compiler's part.
LOCAL = [o for o in operators().values() if o.examples and "~" not in o.factors]


@pytest.mark.parametrize("operator", LOCAL, ids=lambda o: o.name)
def test_factors_are_right_under_every_strategy(operator: Operator) -> None:
    claimed = rule(
        operator.graph_name, operator.factors, flops=operator.flops, examples=operator.examples
    )
    report = prove(claimed, (2,))
    assert report.proved, report

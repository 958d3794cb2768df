"""Every kernel against its reference in float64, on ragged shapes."""

from __future__ import annotations

import pytest
import torch

from autopar_kernels.registry import operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator
from tests.kernels.checks import error, expected, launched, tolerance

KERNELS = [operator for operator in operators().values() if operator.table]
DTYPES = torch.float32, torch.bfloat16
CASES = [(operator, dtype) for operator in KERNELS for dtype in DTYPES if dtype in operator.dtypes]


@pytest.mark.parametrize(
    ("operator", "dtype"), CASES, ids=[f"{o.name}-{str(d)[6:]}" for o, d in CASES]
)
def test_kernel_against_its_reference_in_float64(operator: Operator, dtype: torch.dtype) -> None:
    seen = 0
    for args in operator.samples(Draw(dtype)):
        assert not operator.unfit(args)
        found, wanted = launched(operator, args), expected(operator, args)
        for result, right in zip(found, wanted, strict=True):
            assert error(result, right) <= tolerance(operator, result)
            seen += 1
    assert seen

"""Every kernel against its reference in float64, on ragged shapes."""

from __future__ import annotations

import pytest
import torch

from autopar_kernels.registry import operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import FLOATS, Operator
from tests.kernels.checks import error, expected, launched, tolerance

KERNELS = [operator for operator in operators().values() if operator.table]
CASES = [(operator, dtype) for operator in KERNELS for dtype in FLOATS if dtype in operator.dtypes]


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


@pytest.mark.parametrize("operator", KERNELS, ids=lambda o: o.name)
def test_a_kernel_gives_the_same_bits_again(operator: Operator) -> None:
    args = next(iter(operator.samples(Draw(operator.dtypes[0]))))
    for first, second in zip(launched(operator, args), launched(operator, args), strict=True):
        assert torch.equal(first.double().nan_to_num(), second.double().nan_to_num())

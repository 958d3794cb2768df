"""Every kernel on a GPU against its reference in float64, on ragged shapes."""

from __future__ import annotations

import pytest
import torch

from autopar_kernels.registry import operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator
from tests.kernels.checks import error, expected, launched, tolerance
from tests.support.chips import CHIP

pytestmark = pytest.mark.skipif(CHIP.type != "cuda", reason="kernels need a GPU")
KERNELS = [operator for operator in operators().values() if operator.table]
DTYPES = torch.float32, torch.bfloat16, torch.float16
CASES = [(operator, dtype) for operator in KERNELS for dtype in DTYPES if dtype in operator.dtypes]


@pytest.mark.parametrize(
    ("operator", "dtype"), CASES, ids=[f"{o.name}-{str(d)[6:]}" for o, d in CASES]
)
def test_kernel_against_its_reference_in_float64(operator: Operator, dtype: torch.dtype) -> None:
    seen = 0
    for args in operator.samples(Draw(dtype, "cuda")):
        assert not operator.unfit(args)
        found, again = launched(operator, args), launched(operator, args)
        for result, other, right in zip(found, again, expected(operator, args), strict=True):
            # Compiled arithmetic contracts products and sums, and divides less precisely.
            assert error(result, right) <= 4 * tolerance(operator, result)
            same = torch.equal(result.double().nan_to_num(), other.double().nan_to_num())
            assert same, "two runs differ"
            seen += 1
    assert seen

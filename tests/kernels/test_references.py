"""References against torch's own functions and autograd; operators as torch sees them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from autopar_kernels.registry import operators, register
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator
from tests.kernels.checks import copies

register()
ALL = operators()
ours = torch.ops.autopar_kernels


@pytest.mark.parametrize("operator", ALL.values(), ids=lambda o: o.name)
def test_an_operator_is_registered_as_torch_wants_it(operator: Operator) -> None:
    dtype = torch.float32 if operator.gradient is None else torch.float64
    given = copies(next(iter(operator.samples(Draw(dtype)))))
    tests: tuple[str, ...] = ("test_schema", "test_faketensor")
    if operator.gradient is not None:
        tests += ("test_autograd_registration", "test_aot_dispatch_dynamic")
        given = tuple(
            a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in given
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about its own internals
        torch.library.opcheck(getattr(ours, operator.name).default, given, test_utils=tests)

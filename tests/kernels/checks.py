"""Comparisons that tests of kernels and the benchmark share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar_kernels.registry.operator import TOLERANCE, Operator, listed

EXACT = 0.0


def copies(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, tensors copied with their strides."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a)
        if isinstance(a, Tensor)
        else a
        for a in args
    )


def launched(operator: Operator, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """What the kernel returns, and what it wrote into operands; results hold NaN before."""
    given = copies(args)
    results = operator.allocate(*given)
    for result in listed(results):
        result.fill_(float("nan") if result.is_floating_point() else 77)
    operator.launch(results, *given)
    return (*listed(results), *_written(operator, given))


def expected(operator: Operator, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The same of the reference, calculated in float64 and rounded once."""
    given = copies(args)
    results = operator.reference(*given, wide=torch.float64)
    return (*listed(results), *_written(operator, given))


def _written(operator: Operator, args: Sequence[Any]) -> list[Tensor]:
    operands = operator.operands(args)
    return [t for name in operator.writes if (t := operands[name]) is not None]


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative error in the Frobenius norm; NaN and infinities must stand where they should."""
    assert found.shape == wanted.shape
    a, b = found.double(), wanted.double()
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite), "not finite elsewhere"
    assert torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
    size = b[finite].norm().item()
    return (a[finite] - b[finite]).norm().item() / (size or 1.0)


def tolerance(operator: Operator, result: Tensor) -> float:
    """The relative error allowed of a result; integers must be equal."""
    return operator.tolerance.get(result.dtype, TOLERANCE.get(result.dtype, EXACT))

"""Traces a model as if its parameters had another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autopar.errors import PrecisionError
from autopar.ir.precision import Precision
from autopar.operators.interpret import TORCH_DTYPES


@contextmanager
def computing_in(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Returns a context in which a model's floating parameters have the computing dtype.

    The cast parameters have no values. On exit, the context restores the model. Buffers are
    unchanged.

    Raises:
        PrecisionError: the model has no floating parameter.
    """
    if not precision.compute:
        yield
        return
    dtype = TORCH_DTYPES[precision.compute]
    casts: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_floating_point():
                places.append((module, name, parameter))
                if id(parameter) not in casts:
                    # On the CPU, memory that is never written is not allocated.
                    empty = torch.empty_like(parameter, dtype=dtype)
                    casts[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    if not places:
        raise PrecisionError(
            f"a model without floating parameters cannot compute in {precision.compute}",
            todo="leave out the precision",
        )
    try:
        for module, name, parameter in places:
            setattr(module, name, casts[id(parameter)])  # modules may react to assignment (nn.LSTM)
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)

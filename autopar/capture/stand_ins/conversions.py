"""Modules that forward converts to the dtype and device that they have; others are refused."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.stand_ins.exchanged import exchange
from autopar.errors import CaptureError


def _module_to(*args: Any, **kwargs: Any) -> Any:
    """Runs as the code of torch's function, with the names of torch's module."""
    from autopar.capture.stand_ins.exchanged import called

    return called("_module_to", *args, **kwargs)


def _converted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Returns a module as it is, as `Module.to` does where nothing is to be converted.

    Raises:
        CaptureError: its parameters would become others.
    """
    given = [*args, *kwargs.values()]
    tensors = chain(module.parameters(), module.buffers())
    if all(_keeps(x, item) for x in tensors for item in given):
        return module
    raise CaptureError(
        f"forward converts a {type(module).__name__} by .to({', '.join(map(str, given))})",
        why="a program has parameters of its own, with the dtype and the device of the plan",
        todo="convert the module before it is captured, or in forward what it computes with: "
        "F.linear(x.to(dtype), self.weight.to(dtype))",
    )


def _keeps(x: Tensor, item: object) -> bool:
    """Returns whether an argument of `Module.to` leaves a tensor of the module as it is."""
    if isinstance(item, torch.dtype):
        return x.dtype == item or not x.is_floating_point()
    if isinstance(item, (str, torch.device)):
        device = torch.device(item)
        return x.device.type == device.type and device.index in (None, x.device.index)
    return isinstance(item, bool)  # non_blocking


EXCHANGES = (exchange(nn.Module.to, _module_to, _converted),)

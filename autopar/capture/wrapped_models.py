"""Raises CaptureError for models that are already wrapped, and says what to pass instead."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.errors import CaptureError

_PARALLEL = "autopar splits the model and its batches itself"
_INSIDE = "pass the model inside, .module"
# Kind of module: why it is not captured, and what to pass.
_WRAPPERS: tuple[tuple[type, str, str], ...] = (
    (DistributedDataParallel, _PARALLEL, _INSIDE),
    (DataParallel, _PARALLEL, _INSIDE),
    (FullyShardedDataParallel, _PARALLEL, "pass the model as it was before it was wrapped"),
    (FSDPModule, _PARALLEL, "pass the model as it was before fully_shard"),
    (
        torch.jit.ScriptModule,
        "TorchScript is not Python code that could be traced",
        "pass the nn.Module that was scripted",
    ),
)


def refuse_wrapped(model: nn.Module) -> None:
    """Checks that no part of a model is already parallel, compiled or scripted.

    Raises:
        CaptureError: a part is; the error names it and what to pass instead.
    """
    for path, module in model.named_modules():
        name, place = type(module).__name__, f"the module {path!r}" if path else "the model"
        for kind, why, todo in _WRAPPERS:
            if isinstance(module, kind):
                raise CaptureError(f"{place} is a {name}", why=why, todo=todo)
        # torch has no public name for the class.
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            raise CaptureError(
                f"{place} is a {name}, from torch.compile",
                why="it runs code that was compiled for one device",
                todo='pass the model inside, ._orig_mod, and backend="inductor" to autopar.compile',
            )
    for path, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise CaptureError(
                f"the parameter {path!r} is a DTensor", why=_PARALLEL, todo="pass whole parameters"
            )

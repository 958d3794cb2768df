"""Every private or version-dependent corner of torch that the runtime needs, in one file.

A new release of torch that moves one of them breaks here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# `torch.distributed.Store` is public, but its type stubs live here only.
from torch._C._distributed_c10d import Store as Store
from torch.distributed import distributed_c10d

# torch 2.13 renamed the two; older releases know the older names only.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def own_store() -> Store:
    """A connection of the caller's own to the store that all processes share.

    A connection serves one call at a time: on a shared one, a call would wait behind another
    thread's that blocks.
    """
    store: Any = distributed_c10d._get_default_store()
    connection: Store = store.clone()
    return connection


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of their shapes, in few launches."""
    torch._foreach_copy_(targets, sources)


def storage_id(tensor: Tensor) -> int:
    """A number that tells storages apart while they live; views of one share it."""
    number: int = tensor.untyped_storage()._cdata
    return number


def compile_error() -> type[Exception]:
    """What torch.compile raises where it fails, by whatever part of it."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to load

    error: type[Exception] = TorchDynamoException
    return error


def profiling() -> bool:
    """Whether torch's profiler records this thread."""
    enabled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return enabled

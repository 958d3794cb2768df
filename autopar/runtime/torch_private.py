"""Every private or version-dependent corner of torch that the runtime needs, in one file.

A new release of torch that moves one of them breaks here and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
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


def all_gather_matmul(
    x: Tensor, matrices: list[Tensor], dim: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, list[Tensor]]:
    """x of all ranks of a group along `dim`, and its products, while it is on its way."""
    name = _symmetric(group)
    found: tuple[Tensor, list[Tensor]] = torch.ops.symm_mem.fused_all_gather_matmul(
        x, matrices, dim, name, return_A=True
    )
    return found


def matmul_reduce_scatter(
    x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup | None
) -> Tensor:
    """This rank's part along `dim` of the sum of products over a group, sent as it is made."""
    name = _symmetric(group)
    found: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, name)
    return found


def _symmetric(group: dist.ProcessGroup | None) -> str:
    """The name by which operators on symmetric memory know a group."""
    importlib.import_module("torch.distributed._symmetric_memory")  # defines them
    assert group is not None
    name: str = group.group_name
    return name


def own_store() -> Store:
    """A connection of the caller's own to the store that all processes share.

    A connection serves one call at a time: on a shared one, a call would wait behind another
    thread's that blocks.
    """
    store: Any = distributed_c10d._get_default_store()
    connection: Store = store.clone()
    return connection


def group_timeout() -> timedelta:
    """The time-out that the user gave the default group, or its store's."""
    store: Any = distributed_c10d._get_default_store()
    timeout: timedelta = timeout_of(default_group()) or store.timeout
    return timeout


def norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The L2 norm of each of some tensors, made in `dtype`, in few launches."""
    return torch.stack(list(torch._foreach_norm(tensors, 2, dtype)))


def default_group() -> dist.ProcessGroup:
    """The process group of all processes."""
    group: dist.ProcessGroup = distributed_c10d._get_default_group()
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a call of a group may take, as its maker said; None where its backend has no limit.

    `new_group` does not take it over from the default group, but takes its backend's default.
    """
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


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

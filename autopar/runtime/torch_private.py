"""Every private or version-dependent function of torch that the runtime needs.

A new release of torch that changes one of them breaks only this file.
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
    """Gathers x over a group along `dim`, and multiplies it while it arrives.

    Returns:
        The gathered x, and its product with each matrix.
    """
    name = _symmetric(group)
    results: tuple[Tensor, list[Tensor]] = torch.ops.symm_mem.fused_all_gather_matmul(
        x, matrices, dim, name, return_A=True
    )
    return results


def matmul_reduce_scatter(
    x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Returns this rank's part along `dim` of the sum of products over a group, sent in pieces."""
    name = _symmetric(group)
    result: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, name)
    return result


def _symmetric(group: dist.ProcessGroup | None) -> str:
    """Returns the name of a group for operators on symmetric memory."""
    importlib.import_module("torch.distributed._symmetric_memory")  # defines them
    assert group is not None
    name: str = group.group_name
    return name


def own_store() -> Store:
    """Returns the caller's own connection to the store that all processes share.

    A connection serves one call at a time: on a shared connection, a call would wait for another
    thread's blocking call.
    """
    store: Any = distributed_c10d._get_default_store()
    connection: Store = store.clone()
    return connection


def group_timeout() -> timedelta:
    """Returns the time-out that the user set for the default group, or its store's."""
    store: Any = distributed_c10d._get_default_store()
    timeout: timedelta = timeout_of(default_group()) or store.timeout
    return timeout


def norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the L2 norm of each tensor, computed in `dtype`, in few launches."""
    return torch.stack(list(torch._foreach_norm(tensors, 2, dtype)))


def default_group() -> dist.ProcessGroup:
    """Returns the process group of all processes."""
    group: dist.ProcessGroup = distributed_c10d._get_default_group()
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Returns a group's time-out, None if its backend has no limit.

    `new_group` uses its backend's default rather than the default group's time-out.
    """
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def group_by_name(
    ranks: list[int], timeout: timedelta | None, name: str
) -> dist.ProcessGroup | None:
    """Creates a group of some ranks, which alone call it.

    Torch names such a group by its ranks and by the number of groups that its process has. Where
    these numbers differ, ranks would wait for each other in groups of different names.

    Args:
        ranks: global ranks.
        timeout: of its collectives.
        name: the same on all ranks, and of no other group.
    """
    names = distributed_c10d._process_group_name
    own = distributed_c10d.GroupName(name)
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: own
    try:
        group: dist.ProcessGroup | None = dist.new_group(
            ranks, timeout=timeout, use_local_synchronization=True
        )
    finally:
        distributed_c10d._process_group_name = names
    return group


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors into others of the same shapes, in few launches."""
    torch._foreach_copy_(targets, sources)


def storage_id(tensor: Tensor) -> int:
    """Returns a number that identifies a live storage; views of one storage share it."""
    number: int = tensor.untyped_storage()._cdata
    return number


def compile_error() -> type[Exception]:
    """Returns the exception that torch.compile raises if any part of it fails."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to load

    error: type[Exception] = TorchDynamoException
    return error


def profiling() -> bool:
    """Returns whether torch's profiler records this thread."""
    enabled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return enabled

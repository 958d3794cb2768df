"""Calls torch.distributed.checkpoint, and names the rank in its errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.checkpoint.plans import Part, ReadPlanner, SavePlanner
from autopar.runtime.checkpoint.safetensors_files import Reader, Writer


def write_parts(writer: Writer, planner: SavePlanner, group: dist.ProcessGroup | None) -> None:
    """Writes a checkpoint on all ranks of a group; None for this process alone.

    Raises:
        AutoparError: on every rank, the error of the first failing one.
        RuntimeError: a rank was lost.
    """
    try:
        with _named(f"the checkpoint {writer.path} was not saved"), _quiet(group):
            save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except BaseException:
        writer.abandon()
        raise


def read_parts(
    reader: Reader, wanted: Callable[[], list[Part]], group: dist.ProcessGroup | None
) -> None:
    """Reads the parts that each rank of a group wants; raises as `write_parts` does."""
    with _named(f"the checkpoint {reader.path} was not loaded"), _quiet(group):
        load(
            {},
            storage_reader=reader,
            planner=ReadPlanner(wanted),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def ranks_lost(what: str) -> Iterator[None]:
    """Returns a context in which errors that a watch cannot name become CheckpointErrors."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise CheckpointError(
            what, why=f"the ranks lost one another: {error}", todo="look for the first that failed"
        ) from error


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Returns a context that raises errors of torch's checkpoints as those of the failing rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise _of_rank(what, rank, cause) from error


def _of_rank(what: str, rank: int, cause: BaseException) -> AutoparError:
    """Returns the error that every rank raises if `rank` failed."""
    if isinstance(cause, AutoparError):
        where = f"rank {rank}, {cause.where}" if cause.where else f"rank {rank}"
        return type(cause)(cause.what, where=where, why=cause.why, todo=cause.todo)
    return CheckpointError(what, where=f"rank {rank}", why=f"{type(cause).__name__}: {cause}")


@contextmanager
def _quiet(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Silences torch's warning about a missing process group, which a single process may lack."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        yield

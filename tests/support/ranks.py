"""Runs a function on several gloo processes of this machine and collects the results.

With AUTOPAR_TESTS_ON_GPU=1 the processes share the first GPU, see `tests.support.staged`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from autopar.runtime.ranks.processes import from_first_rank
from tests.support import staged
from tests.support.chips import ON_GPU

# After which a collective counts as hanging: far more than a busy machine makes a rank wait.
PATIENCE = timedelta(minutes=10)
# Where sessions capture: calls of a model, and the two of a generation.
CAPTURES = (("compiler", "capture_parts"), ("generation.pair", "capture_generation"))


@contextmanager
def forking() -> Iterator[ForkServerContext]:
    """A way to start processes at once: each is a fork of one that has imported what they need.

    Every process is a fresh one, which no other can spoil. What they share is the seed of Python's
    hashes, and one thread each for torch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server, which the first process starts
    try:
        yield context
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


@contextmanager
def shared_captures() -> Iterator[None]:
    """Lets the first rank capture for all, which takes most of the time of a small model's ranks.

    autopar itself captures on every rank, and compares the graphs.
    """
    with ExitStack() as stack:
        for where, name in CAPTURES:
            module = importlib.import_module(f"autopar.session.{where}")
            together = partial(_on_first_rank, getattr(module, name))
            stack.enter_context(patch.object(module, name, together))
        yield


def _on_first_rank(capture: Callable[..., Any], *args: Any) -> Any:
    return from_first_rank(lambda: capture(*args))


def environment_of_launcher() -> dict[str, str]:
    """Returns what torchrun tells a rank; nobody listens at the port, as the ranks have met."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    return given | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def _rank(
    rank: int,
    count: int,
    folder: str,
    patience: timedelta,
    captures: bool,
    function: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    if ON_GPU:
        staged.register()
    dist.init_process_group(
        f"cpu:{staged.BACKEND},cuda:{staged.BACKEND}" if ON_GPU else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=patience,
    )
    with nullcontext() if captures else shared_captures():
        result = function(*args)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    count: int = 4,
    start: str = "forkserver",
    patience: timedelta = PATIENCE,
    captures: bool = False,
) -> list[Any]:
    """What `function(*args)` returns on each of `count` ranks, in rank order.

    The function must be importable (defined at the top of a module). An exception on a rank stops
    the others and is raised here with that rank's traceback. `start="spawn"` takes seconds longer
    and gives every rank an interpreter of its own, as launchers do, whose sets have other orders.
    With `captures` every rank captures its models itself, as always with spawned ones.
    """
    with tempfile.TemporaryDirectory() as folder, forking():
        given = (count, folder, patience, captures or start == "spawn", function, args)
        start_processes(_rank, given, nprocs=count, start_method=start)
        return [
            torch.load(Path(folder) / f"{r}.pt", weights_only=False, map_location="cpu")
            for r in range(count)
        ]

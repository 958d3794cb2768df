"""Ranks that stop between steps: all others end in time and say what that rank did last."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import autopar
from autopar.runtime import torch_private
from autopar.session import compiler
from autopar.session.session import Session
from tests.runtime.ranks import kills
from tests.runtime.ranks.test_failure import run, wait_until_over
from tests.support import models

WHO = 2
MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: x=4 @10GB/s 1us"


def train(
    rank: int,
    folder: Path,
    batches: Callable[[int, Path], bool | None],
    patience: timedelta | None = None,
) -> None:
    """Steps between which rank WHO does something else; errors end as a script's do.

    From then on collectives give up after `patience`, if given.
    """
    torch.manual_seed(0)
    model, batch = models.mlp((8, 8, 8))
    try:
        program: Session = autopar.compile(
            model,
            MESH,
            loss_fn=models.squared_error,
            example_inputs=batch,
            pins=autopar.pins.data_parallel("x"),
            dump=folder / "dump",
        )
        for step in range(5):
            if step == 3 and patience is not None:
                shorten_time_outs(patience)
            if step == 3 and rank == WHO and batches(rank, folder):
                program.close()
                wait_until_over(folder)  # does something else
                return
            program.step(**batch)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)


def shorten_time_outs(patience: timedelta) -> None:
    """Of all groups, once all ranks are there: until then they may take as long as they like."""
    dist.barrier()
    for group in distributed_c10d._world.pg_map:
        group._get_backend(torch.device("cpu"))._set_default_timeout(patience)


def spinning_loader(rank: int, folder: Path) -> None:
    while True:
        time.sleep(0.01)


def failing_loader(rank: int, folder: Path) -> None:
    raise OSError("no such shard of data")


def leaving_loader(rank: int, folder: Path) -> None:
    sys.exit(0)


def shorter_loader(rank: int, folder: Path) -> bool:
    return True


def close(rank: int, folder: Path) -> None:
    train(rank, folder, shorter_loader)


def spin(rank: int, folder: Path) -> None:
    train(rank, folder, spinning_loader, patience=timedelta(seconds=6))


def fail(rank: int, folder: Path) -> None:
    train(rank, folder, failing_loader)


def leave(rank: int, folder: Path) -> None:
    train(rank, folder, leaving_loader)


def fail_in_capture(rank: int, folder: Path) -> None:
    """Rank WHO fails before its graph is compared with the others'."""
    if rank == WHO:
        compiler.capture_parts = failing_capture  # type: ignore[assignment]
    train(rank, folder, failing_loader)


def failing_capture(*args: object) -> None:
    raise OSError("no such shard of data")


def die_in_capture(rank: int, folder: Path) -> None:
    """Rank WHO is killed before its graph is compared with the others'."""
    if rank == WHO:
        compiler.capture_parts = deadly_capture  # type: ignore[assignment]
    train(rank, folder, failing_loader)


def deadly_capture(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param(spin, "rank 2 did not come in time", marks=pytest.mark.slow),  # waits 20 s
        pytest.param(fail, "rank 2 failed: OSError: no such shard of data", marks=pytest.mark.slow),
        (leave, "rank 2 ended in the middle of the training"),
        pytest.param(close, "rank 2 closed the program", marks=pytest.mark.slow),
        pytest.param(fail_in_capture, "rank 2 failed: ", marks=pytest.mark.slow),
        (die_in_capture, "rank 2 was lost"),
    ],
)
def test_the_others_end_and_say_why(
    how: Callable[[int, Path], None], said: str, tmp_path: Path
) -> None:
    ended = run(how, tmp_path, "file")
    for rank, end in enumerate(ended):
        if rank != WHO:
            assert end.status == 1, end.stderr
            assert "fewer calls" in end.stderr or how is not close
            assert said in end.stderr, end.stderr
            assert f"autopar doctor {tmp_path}/dump" in end.stderr
    others = "\n".join(end.stderr for rank, end in enumerate(ended) if rank != WHO)
    if how is spin:
        # The user's line, and the generated one at which the others wait.
        assert "in spinning_loader" in others
        assert "between steps, after step 3" in others
    if how in (spin, fail, fail_in_capture):
        assert (tmp_path / "dump" / f"rank-{WHO}.json").exists()


def test_the_time_out_of_the_default_group_is_found(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=77),
    )
    try:
        limit = torch_private.timeout_of(torch_private.default_group())
    finally:
        dist.destroy_process_group()
    assert limit == timedelta(seconds=77)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_is_killed_or_stopped_anywhere(seed: int, tmp_path: Path) -> None:
    """pytest -m slow tests/runtime/ranks/test_endings.py; more by python -m of `kills`."""
    outcome = kills.play(kills.Kill.drawn(seed, tuple(kills.KINDS)), tmp_path)
    assert not outcome.wrong

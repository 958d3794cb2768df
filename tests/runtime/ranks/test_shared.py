"""Programs release all system resources: process groups, threads, descriptors."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import autopar
from autopar.errors import ProgramError
from autopar.runtime import torch_private
from autopar.runtime.folder import OpenProgram
from autopar.runtime.ranks.shared import Peers
from autopar.session.session import Session
from tests.support import models
from tests.support.ranks import PATIENCE, run_ranks

MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: x=2 @10GB/s 1us"
SQUARE = "cpu[1GFLOP/s 64GiB 1GB/s]: x=2, y=2 @10GB/s 1us"
WAIT = 600.0  # seconds in which threads that do not end count as hanging


def program(mesh: str = MESH, **options: object) -> tuple[Session, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = models.mlp((8, 8, 8))
    made = autopar.compile(
        model,
        mesh,
        loss_fn=models.squared_error,
        example_inputs=batch,
        **options,  # type: ignore[arg-type]
    )
    return made, batch


def pipeline(mesh: str = MESH) -> tuple[Session, dict[str, torch.Tensor]]:
    return program(mesh, stages=2, microbatches=2)


def process_groups() -> list[dist.ProcessGroup]:
    return list(distributed_c10d._world.pg_map)


def taken() -> tuple[int, int, int]:
    """Descriptors, threads and process groups of this process."""
    gc.collect()
    paths = ("/proc/self/fd", "/proc/self/task")
    return (*(len(os.listdir(path)) for path in paths), len(process_groups()))  # type: ignore


def settled(before: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is taken once threads that end have ended."""
    end = time.monotonic() + WAIT
    while taken() != before and time.monotonic() < end:
        time.sleep(0.05)
    return taken()


def share(folder: str) -> None:
    before = taken()
    first, batch = program()
    alone = len(process_groups())
    second, _ = program(ema=0.9)
    assert len(process_groups()) == alone > 1
    first.close()
    # The groups are the second's now.
    assert float(second.step(**batch).detach()) > 0
    for call in (lambda: first.step(**batch), first.state_dict, lambda: first.save(folder)):
        with pytest.raises(ProgramError, match="the program is closed"):
            call()
    assert "def forward" in first.source
    first.close()
    second.close()
    staged, _ = pipeline()
    with staged:
        staged.step(**batch)
        staged.save_checkpoint(folder, asynchronous=True)
        # The time-out of the user's group is that of all others.
        limits = {torch_private.timeout_of(group) for group in process_groups()}
        assert limits == {PATIENCE}
        assert len(process_groups()) > 2
    with pytest.raises(ProgramError, match="the program is closed"):
        staged.step(**batch)
    assert settled(before) == before


def collect_on_one_rank(folder: str) -> None:
    """Rank 1's garbage collector gives groups back that rank 0 still has."""
    before = taken()
    first, batch = program()
    loss = first.step(**batch)
    kept = [first] if dist.get_rank() == 0 else []
    del first
    gc.collect()
    second, _ = program()
    assert torch.equal(second.step(**batch), loss)
    third, _ = program()
    assert torch.equal(third.step(**batch), loss)
    kept.clear()
    del second, third
    assert settled(before) == before


def destroy(folder: str) -> None:
    """The user ends all process groups, and begins again."""
    first, batch = program()
    first.step(**batch)
    dist.destroy_process_group()
    with pytest.raises(ProgramError, match="process groups are gone"):
        first.step(**batch)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=RANK[0], world_size=2
    )
    second, _ = program()
    second.step(**batch)
    first.close()  # gives nothing back that is the second's
    second.step(**batch)
    second.close()


RANK: list[int] = []


def play(function: Callable[[str], None], folder: str) -> None:
    RANK[:] = [dist.get_rank()]
    # Starts the threads of autograd, of which a build for CUDA has several.
    torch.ones(1, requires_grad=True).sum().backward()
    function(folder)


@pytest.mark.parametrize("function", [share, collect_on_one_rank, destroy])
def test_groups_are_shared_and_given_back(function: Callable[[str], None], tmp_path: Path) -> None:
    run_ranks(play, function, str(tmp_path), count=2)


def many(folder: str, closes: bool) -> list[tuple[int, int, int]]:
    with torch.profiler.profile():  # starts a thread of torch's own, which stays
        torch.ones(1).sum()
    counts = [taken()]
    for number in range(40):
        made, batch = (program, pipeline)[number % 2](SQUARE)
        made.step(**batch, profile=f"{folder}/profile.json" if number % 8 < 2 else None)
        if number % 4 < 2:
            made.save_checkpoint(f"{folder}/checkpoint", asynchronous=True).result()
        if number % 8 == 0:
            opened = OpenProgram(made.save(f"{folder}/program"))
            opened.step(opened.example)
            if closes:
                opened.close()
            del opened
        if closes:
            made.close()
        del made
    counts.append(settled(counts[0]))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("closes", [True, False])
def test_forty_programs_leave_nothing(closes: bool, tmp_path: Path) -> None:
    """pytest -m slow tests/runtime/ranks/test_shared.py"""
    for before, after in run_ranks(many, str(tmp_path), closes):
        assert after == before


def of_unequal_numbers() -> float:
    """Joins the last two ranks, of which one has a further group."""
    rank = dist.get_rank()
    if rank == 2:
        dist.new_group([2], use_local_synchronization=True)
    total = torch.tensor([float(rank)])
    if rank:
        lease = Peers.here().left("test", (1, 2), "the last two")
        lease.channels[0].all_reduce(total)
        lease.close()
    return total.item()


def test_ranks_with_unequal_numbers_of_groups_make_one_together() -> None:
    """As survivors of a loss do, of which some have not ended their old groups."""
    assert run_ranks(of_unequal_numbers, count=3) == [0.0, 3.0, 3.0]

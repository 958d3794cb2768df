"""A pipeline rank that fails or dies during a step: all ranks end, and name it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import autopar
from autopar.runtime.pipeline import stage
from tests.runtime.ranks.test_failure import run
from tests.support import models

WHO = 2  # in the middle: one rank waits for its activations, another for its gradients


def train(folder: Path, rank: int, fails: bool) -> None:
    """Steps of a pipeline of four stages; in the third, rank WHO does not do its second forward."""
    torch.manual_seed(0)
    model, batch = models.mlp((8, 8, 8, 8, 8))
    program = autopar.compile(
        model,
        "cpu[1GFLOP/s 64GiB 1GB/s]: gpu=4 @10GB/s 1us",
        loss_fn=models.squared_error,
        example_inputs=batch,
        stages=4,
        microbatches=4,
    )
    forward, calls = stage.Stage.forward, 0

    def failing(self: stage.Stage, *args: object) -> object:
        nonlocal calls
        calls += 1
        if rank == WHO and calls == 10:
            if not fails:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom in stage 2")
        return forward(self, *args)  # type: ignore[arg-type]

    stage.Stage.forward = failing  # type: ignore[method-assign, assignment]
    for _ in range(5):
        program.step(**batch)


def raise_error(rank: int, folder: Path) -> None:
    train(folder, rank, fails=True)


def die(rank: int, folder: Path) -> None:
    train(folder, rank, fails=False)


@pytest.mark.slow
def test_an_error_stops_all_ranks(tmp_path: Path) -> None:
    for rank, end in enumerate(run(raise_error, tmp_path, "file")):
        assert end.status != 0
        if rank != WHO:
            assert "rank 2 failed: ValueError: boom in stage 2" in end.stderr


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_lost_rank_stops_all_ranks(store: str, tmp_path: Path) -> None:
    for rank, end in enumerate(run(die, tmp_path, store)):
        assert end.status != 0
        if rank != WHO:
            assert "rank 2 was lost" in end.stderr

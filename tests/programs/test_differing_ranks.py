"""Ranks that pass other models, plans or batches than the first one, or capture for themselves."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import BatchError, InfeasibleError
from tests.programs.test_program import GRID, close, regression, same_state, train_alone
from tests.support.ranks import run_ranks


def first_rank_counts() -> None:
    """Other weights on the other ranks do not matter."""
    model, batches = regression(seed=dist.get_rank())
    first, batches = regression(seed=0)
    program = autopar.compile(model, GRID, example_inputs=batches[0])
    same_state(program, first)


def one_plan_for_all_ranks(folder: str) -> None:
    """Here a search would find another plan on every other rank, as where time runs out."""
    model, batches = regression()
    pin = "[32, 16@data@tensor]" if dist.get_rank() == 0 else "[32@data@tensor, 16]"
    search = (planning := importlib.import_module("autopar.planning.plan_model")).make_plan

    def elsewhere(graph: Any, mesh: Any, options: Any, *more: Any) -> Any:
        found = dataclasses.replace(options, pins={"net.layers.0.weight": pin})
        return search(graph, mesh, found, *more)

    trace = Path(folder) / "trace"
    with patch.object(planning, "make_plan", elsewhere):
        program = autopar.compile(model, GRID, trace=trace, example_inputs=batches[0])
    assert "[32, 16@data@tensor]" in str(program.plan.stage.nodes["net_layers_0_weight"])
    losses, _ = train_alone(model, torch.optim.AdamW(model.parameters()), batches)
    for batch, loss in zip(batches, losses, strict=True):
        close(program.step(**batch), loss)
    (written,) = trace.glob("*_plan.toml")
    assert autopar.Plan.from_toml(written.read_text(encoding="utf-8")) == program.plan
    (written,) = trace.glob("*_program.py")
    assert program.source in written.read_text(encoding="utf-8")
    with pytest.raises(InfeasibleError):
        autopar.compile(model, GRID, memory=1e3, example_inputs=batches[0])


def wrong_batches_are_refused_and_survived() -> None:
    rank = dist.get_rank()
    model, batches = regression()
    batch = batches[0]
    program = autopar.compile(model, GRID, example_inputs=batch)
    losses, _ = train_alone(model, torch.optim.AdamW(model.parameters()), batches)
    half = {name: value[:4] for name, value in batch.items()}
    other = {**batch, "x": batch["x"] + rank}
    odd = half if rank == 2 else batch
    for wrong, why in [(half, r"f64\[4, 16\]"), (other, "different batches"), (odd, "batch|f64")]:
        with pytest.raises(BatchError, match=why):
            program.step(**wrong)
        dist.barrier()
        if why == r"f64\[4, 16\]":  # evaluations take any number of rows
            assert program(**half).isfinite()
        else:
            with pytest.raises(BatchError, match=why):
                program(**wrong)
        dist.barrier()
    close(program.step(**batch), losses[0])

    fresh = autopar.compile(regression()[0], GRID)
    with pytest.raises(BatchError, match="the captured graph"):
        fresh.step(**odd)
    close(fresh.step(**batch), losses[0])


def differing(folder: str) -> None:
    first_rank_counts()
    one_plan_for_all_ranks(folder)
    wrong_batches_are_refused_and_survived()


def test_ranks_that_capture_for_themselves_get_one_program(tmp_path: Path) -> None:
    run_ranks(differing, str(tmp_path), captures=True)

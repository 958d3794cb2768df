"""Figures of steps that callbacks receive, compared with closed forms and with a delayed rank."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed import FileStore, Store

import autopar
from autopar.cost.device import device
from autopar.errors import MissingDependencyError
from autopar.ir.mesh import Mesh
from autopar.runtime.ranks.recorder import Event, Recorder
from autopar.session.step_metrics import StepMetrics
from tests.support.ranks import run_ranks

PEAK = device(Mesh.parse("cpu[2GFLOP/s 1GiB 1GB/s]: data=2")).rate("f32", True)
ROWS, WIDTHS, LATE = 8, (16, 32, 4), 0.1
# The first layer's input has no gradient.
FLOPS = ROWS * (4 * WIDTHS[0] * WIDTHS[1] + 6 * WIDTHS[1] * WIDTHS[2])


class Kept:
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.closed = 0

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def close(self) -> None:
        self.closed += 1


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn(ROWS, WIDTHS[0], generator=generator),
        "labels": torch.randint(WIDTHS[2], (ROWS,), generator=generator),
    }


def entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, labels)


def session(ranks: int, **options: Any) -> autopar.Session:
    torch.manual_seed(0)
    layers = [nn.Linear(*WIDTHS[:2]), nn.ReLU(), nn.Linear(*WIDTHS[1:])]
    mesh = f"cpu[2GFLOP/s 1GiB 1GB/s]: data={ranks} @1TB/s 1ns"
    return autopar.compile(nn.Sequential(*layers), mesh, loss_fn=entropy, **options)


@contextmanager
def second_is_late(store: Store, step: str) -> Iterator[None]:
    """The second rank begins a step `LATE` seconds after the first one has begun to wait in it."""
    if dist.get_rank() == 1:
        store.get(step)
        time.sleep(LATE)
        yield
        return
    begin, wait = Recorder.begin, Event.wait

    def beginning(recorder: Recorder, *args: Any, **options: Any) -> Event:
        event = begin(recorder, *args, **options)
        if event.waiting:
            store.set(step, "waits")
        return event

    def waiting(event: Event) -> None:
        wait(event)
        store.set(step, "waits")

    with patch.object(Recorder, "begin", beginning), patch.object(Event, "wait", waiting):
        yield


def late(stages: int, store: Store) -> tuple[list[StepMetrics], list[float]]:
    options = {"stages": 2, "microbatches": 2} if stages == 2 else {"batches": "local"}
    kept, losses = Kept(), []
    given = batch()
    if stages == 1:
        given = {name: value.chunk(2)[dist.get_rank()] for name, value in given.items()}
    with session(2, **options) as program:
        program.add_callback(kept)
        losses.append(program.step(**given).item())  # compiles
        with second_is_late(store, f"of {stages} stages"):
            losses.append(program.step(**given).item())
    assert kept.closed == 1
    return kept.steps, losses


def on_two(folder: str) -> list[tuple[list[StepMetrics], list[float]]]:
    store = FileStore(f"{folder}/waits", 2)
    return [late(1, store), late(2, store)]


def test_two_ranks(tmp_path: Path) -> None:
    for first, second in zip(*run_ranks(on_two, str(tmp_path), count=2), strict=True):
        for steps, losses in (first, second):
            assert [one.step for one in steps] == [1, 2]
            assert [one.loss for one in steps] == losses
            for one in steps:
                assert (one.samples, one.tokens) == (ROWS, ROWS)
                assert one.model_flops == FLOPS
                assert one.utilisation == pytest.approx(FLOPS / (2 * PEAK * one.seconds))
                assert one.tokens_per_second == ROWS / one.seconds
                assert one.memory > 2**24
                assert one.exposed_seconds is not None
                assert one.exposed_seconds <= one.seconds
                assert one.grad_norm is not None
        # The first rank waits for the second, which is late.
        assert first[0][1].exposed_seconds > LATE


def test_progress_says_what_is_done(tmp_path: Path) -> None:
    text, kept = io.StringIO(), Kept()
    with session(1) as program:
        program.add_callback(autopar.callbacks.Progress(3, Console(file=text, width=120)))
        program.add_callback(kept)
        for _ in range(3):
            program.step(**batch())
    line = text.getvalue().splitlines()[-1]
    assert "3/3" in line
    assert f"loss {kept.steps[-1].loss:.4f}" in line
    assert "tokens/s" in line
    assert "MFU" in line


def test_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B gets all figures; a package that is missing is named."""
    calls: list[Any] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            calls.append((step, figures))

        def finish(self) -> None:
            calls.append("finished")

    class Package:
        @staticmethod
        def init(**options: Any) -> Run:
            calls.append(options)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Package)  # type: ignore[arg-type]
    kept = Kept()
    with session(1) as program:
        program.add_callback(autopar.callbacks.WandB(project="p"))
        program.add_callback(kept)
        program.step(**batch())
    options, (step, figures), end = calls
    assert (options, step, end) == ({"project": "p"}, 1, "finished")
    assert figures["train/loss"] == kept.steps[0].loss
    assert figures["train/tokens_per_second"] == kept.steps[0].tokens_per_second
    for name, make in (
        ("wandb", autopar.callbacks.WandB),
        ("tensorboard", lambda: autopar.callbacks.TensorBoard(tmp_path)),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingDependencyError, match=f"{name} is not installed"):
            make()

"""Checkpoints of programs: a run that loads one continues like an uninterrupted run.

The oracle is the unsharded model in plain torch, trained without interruption, in float64.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autopar
from autopar.errors import CheckpointError, RankFailedError
from autopar.pins import data_parallel, fsdp, megatron
from autopar.runtime.checkpoint import publish
from autopar.runtime.checkpoint import safetensors_files as storage
from autopar.runtime.checkpoint.values import DTYPES
from tests.runtime.checkpoint.test_checkpoint import contents, full_disk
from tests.runtime.ranks.test_failure import run
from tests.support import models
from tests.support.parity import WithLoss
from tests.support.ranks import run_ranks

GRID = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
PAIR = "cpu: data=2 @1TB/s 1ns"
SINGLE = "cpu: x=1"
STEPS, SAVED = 6, 3
WHO = 1  # dies
Batch = dict[str, Tensor]


class Language(WithLoss):
    """GPT-2 and its loss: tied weights, a fused projection of queries, keys and values."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(input_ids=input_ids).logits, labels)


def language(dropout: float = 0.0, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Sizes that no mesh divides evenly: 97 tokens, 31 positions, a width of 36."""
    torch.manual_seed(seed)
    model, _ = models.gpt2(dropout=dropout, vocab_size=97, n_positions=31, n_embd=36)
    torch.manual_seed(5)
    tokens = torch.randint(0, 97, (8, 15))
    return Language(model, 1).double(), {"input_ids": tokens, "labels": tokens.clone()}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Its state has a Counter, and the rate differs from step to step."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 4], gamma=0.7)


@functools.cache
def alone(dropout: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of the unsharded model, trained without a break."""
    model, batch = language(dropout)
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


class Run:
    """A program that trains the model, from any weights; `planned` are arguments of compile."""

    def __init__(self, mesh: str, dropout: float, seed: int = 7, **planned: Any) -> None:
        model, self.batch = language(dropout, seed)
        self.program = autopar.compile(
            model,
            mesh,
            optimizer=make_optimizer,
            clip_norm=0.5,
            example_inputs=self.batch,
            **planned,
        )
        self.scheduler = make_scheduler(self.program.optimizer)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(self.program.step(**self.batch).item())
            self.scheduler.step()
        return losses

    def save(self, path: Path, **options: Any) -> Any:
        values = {"where": "here", "betas": (0.9, [1])}
        return self.program.save_checkpoint(
            path, scheduler=self.scheduler, values=values, **options
        )

    def load(self, path: Path) -> None:
        values = self.program.load_checkpoint(path, scheduler=self.scheduler)
        assert values == {"where": "here", "betas": (0.9, [1])}


def same(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


# A rank dies in the middle of a save --------------------------------------------------------------


def die_while_saving(rank: int, folder: Path) -> None:
    """ZeRO-3 on 2x2 devices: save, go on, and save again, which rank WHO does not survive."""
    trained = Run(GRID, 0.1, seed=0, pins=[data_parallel()], state="zero3")
    torch.manual_seed(1 + rank)  # the first rank's numbers count
    losses = trained.steps(SAVED)
    trained.save(folder / "saved")
    losses += trained.steps(1)
    (folder / f"{rank}.json").write_text(json.dumps(losses))
    write = storage.save_file

    def half(tensors: dict[str, Tensor], path: Path) -> None:
        write(tensors, path)
        if rank == WHO:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    storage.save_file = half
    try:
        trained.save(folder / "saved")
    except (CheckpointError, RankFailedError) as error:
        (folder / f"{rank}.error").write_text(str(error))


def resume(folder: str, mesh: str) -> list[float]:
    """ZeRO-1, from any weights."""
    resumed = Run(mesh, 0.1, pins=[data_parallel()], state="zero1")
    resumed.load(Path(folder) / "saved")
    return resumed.steps(STEPS - SAVED)


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_after_a_rank_died_in_a_save(tmp_path: Path) -> None:
    ends = run(die_while_saving, tmp_path, "file")
    assert ends[WHO].status == -signal.SIGKILL
    for rank in set(range(4)) - {WHO}:
        error = tmp_path / f"{rank}.error"  # unless its process was ended in the save
        said = ends[rank].stderr + (error.read_text() if error.exists() else "")
        assert f"rank {WHO} was lost" in said, said
        same(json.loads((tmp_path / f"{rank}.json").read_text()), alone(0.1)[0][: SAVED + 1])
    for losses in run_ranks(resume, str(tmp_path), PAIR, count=2):
        same(losses, alone(0.1)[0][SAVED:])


# From plan to plan --------------------------------------------------------------------------------

PLANS: list[dict[str, Any]] = [
    {"pins": [data_parallel()], "state": "paro-iig", "microbatches": 2},
    {"stages": 2, "microbatches": 2},
    {"pins": [data_parallel("data"), megatron("tensor")]},
    {"stages": 4, "microbatches": 4, "schedule": "gpipe"},
    {},
]


def relay(folder: str, plans: list[int]) -> list[float]:
    """Every plan takes over from the one before, after two steps; the first from its own model."""
    losses: list[float] = []
    for leg, number in enumerate(plans):
        runner = Run(GRID, 0.0, seed=0 if leg == 0 else 7 + leg, **PLANS[number])
        if leg:
            runner.load(Path(folder) / str(leg - 1))
        losses += runner.steps(2)
        saving = runner.save(Path(folder) / str(leg), asynchronous=leg % 2 == 1)
        saving.result()
    return losses


def go_on_alone(folder: Path, plans: list[int], losses: list[float]) -> None:
    """One process takes the last checkpoint of a relay, and a plain model its weights."""
    expected, state = alone(0.0)
    assert len(losses) == 2 * len(plans)
    same(losses, expected[: len(losses)])
    plain, _ = language(0.0, seed=9)
    plain.load_state_dict(autopar.load_checkpoint(folder / str(len(plans) - 1)))
    if len(losses) == STEPS:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-12)
    single = Run(SINGLE, 0.0)
    single.load(folder / str(len(plans) - 1))
    same(single.steps(STEPS - len(losses)), expected[len(losses) :])


@pytest.mark.slow
@pytest.mark.parametrize("plans", [[0, 1, 2], [1, 0, 3], [3, 2], [4, 1], [2, 4]], ids=str)
def test_plans_take_over_from_one_another(plans: list[int], tmp_path: Path) -> None:
    for losses in run_ranks(relay, str(tmp_path), plans):
        go_on_alone(tmp_path, plans, losses)


def pipeline_with_dropout(folder: str, schedule: str, seed: int, load: bool) -> list[float]:
    """Its random numbers are those of microbatches one after the other, whatever the schedule."""
    options = {"stages": 2, "microbatches": 2, "schedule": schedule}
    runner = Run(GRID, 0.1, seed=seed, **options)
    torch.manual_seed(seed)
    if load:
        runner.load(Path(folder))
        return runner.steps(2)
    losses = runner.steps(1)
    runner.save(Path(folder))
    return losses + runner.steps(2)


@pytest.mark.slow
def test_a_pipeline_with_dropout_goes_on_in_another_schedule(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    first = run_ranks(pipeline_with_dropout, path, "1f1b", 0, False)
    second = run_ranks(pipeline_with_dropout, path, "interleaved_1f1b chunks=2", 3, True)
    for losses in second:
        same(losses, first[0][1:])


# On four ranks, quickly ---------------------------------------------------------------------------


class Odd(nn.Module):
    """Nothing in it divides by four."""

    def __init__(self) -> None:
        super().__init__()
        self.net = models.Mlp((9, 7, 11, 5))
        self.register_buffer("mean", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.net(x - self.mean).square().mean()


def odd(mesh: str, seed: int, **planned: Any) -> autopar.Session:
    torch.manual_seed(seed)
    model = Odd().double()
    return autopar.compile(model, mesh, optimizer=make_optimizer, example_inputs=BATCH, **planned)


BATCH = {"x": torch.arange(72.0, dtype=torch.float64).reshape(8, 9).sin()}


def losses_of(program: autopar.Session, count: int = 2) -> list[float]:
    return [program.step(**BATCH).item() for _ in range(count)]


def one_rank_cannot_write(path: Path, program: autopar.Session) -> None:
    """Its disk is full; all ranks hear of it, and the checkpoint that was there stays."""
    before = contents(path)
    write = storage.save_file

    def limited(tensors: dict[str, Tensor], file: Path) -> None:
        # The processes meet in a file too, which has room.
        with full_disk(100 if dist.get_rank() == 2 else 10**9):
            write(tensors, file)

    storage.save_file = limited
    for asynchronous in (False, True):
        dist.barrier()
        with pytest.raises(CheckpointError, match="cannot be written") as caught:
            program.save_checkpoint(path, asynchronous=asynchronous).result()
        assert caught.value.where == "rank 2, rank_2.safetensors"
    storage.save_file = write
    with pytest.raises(CheckpointError, match="values cannot be saved") as caught:
        program.save_checkpoint(path, values=print if dist.get_rank() == 3 else 1)
    assert caught.value.where == "rank 3"
    dist.barrier()
    assert contents(path) == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    dist.barrier()


def one_rank_finds_it_damaged(path: Path, program: autopar.Session, losses: list[float]) -> None:
    """Each file is checked by one rank; all refuse it, and go on as if nothing had been."""
    file = next(path.rglob("rank_1.safetensors"))
    content = file.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    dist.barrier()
    with pytest.raises(CheckpointError, match="is damaged"):
        program.load_checkpoint(path)
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(content)
    dist.barrier()
    same(losses_of(program), losses)


def read_by_torch(path: Path) -> dict[str, Tensor]:
    """A checkpoint as torch's own planner reads it into DTensors that are split otherwise."""
    found = publish.read(path)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    state: dict[str, Any] = {
        name: distribute_tensor(
            torch.zeros(stored.shape, dtype=DTYPES[stored.dtype]),
            grid,
            [Shard(0), Shard(len(stored.shape) - 1)] if stored.shape else [Replicate()] * 2,
        )
        for name, stored in found.tensors.items()
    }
    load(state, storage_reader=storage.Reader(path, found))
    return {name: value.full_tensor() for name, value in state.items()}


def only_slices_are_read(path: Path) -> None:
    """Weights from a file and from the first rank: as many elements as this rank holds."""
    program = odd(GRID, 3, pins=[fsdp("data", "tensor")])
    expected = load_file(path)
    moved = {"read": 0, "received": 0}
    read, receive = storage.Reader.read_data, dist.recv

    def reading(self: storage.Reader, plan: Any, planner: Any) -> Any:
        moved["read"] += sum(math.prod(item.lengths) for item in plan.items)
        return read(self, plan, planner)

    def receiving(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        moved["received"] += tensor.numel()
        return receive(tensor, *args, **kwargs)

    storage.Reader.read_data, dist.recv = reading, receiving  # type: ignore[method-assign]
    program.load_weights(path)
    torch.testing.assert_close(program.state_dict(), expected, rtol=0, atol=0)
    again = odd(GRID, 4, pins=[fsdp("data", "tensor")])
    again.load_weights(expected if dist.get_rank() == 0 else {})
    torch.testing.assert_close(again.state_dict(), expected, rtol=0, atol=0)
    storage.Reader.read_data, dist.recv = read, receive  # type: ignore[method-assign]
    executor = program._ready()
    own = sum(h.tensor.numel() for h in executor.held)
    whole = sum(value.numel() for value in expected.values())
    assert own < whole / 2
    assert moved == {"read": own, "received": own if dist.get_rank() else 0}
    with pytest.raises(CheckpointError, match="missing: mean"):
        again.load_weights({k: v for k, v in expected.items() if k != "mean"})


def four_ranks(folder: str) -> list[float]:
    path = Path(folder) / "saved" / "one"
    program = odd(GRID, 0, pins=[fsdp("data", "tensor")])
    losses = losses_of(program)
    program.save_checkpoint(path, asynchronous=True).result()
    full = program.state_dict()
    if dist.get_rank() == 0:
        save_file({k: v.clone() for k, v in full.items()}, Path(folder) / "full.safetensors")
    found = read_by_torch(path)
    for name, value in full.items():
        torch.testing.assert_close(found[f"model.{name}"], value, rtol=0, atol=0)
    one_rank_cannot_write(path, program)
    rest = losses_of(program)
    other = odd("cpu: gpu=4 @1TB/s 1ns", 1, pins=[data_parallel("gpu")])
    other.load_checkpoint(path)
    one_rank_finds_it_damaged(path, other, rest)
    only_slices_are_read(Path(folder) / "full.safetensors")
    return losses + rest


def test_four_ranks_save_and_load_together(tmp_path: Path) -> None:
    results = run_ranks(four_ranks, str(tmp_path))
    single = odd(SINGLE, 0)
    same(results[0], losses_of(single, 4))
    assert all(losses == results[0] for losses in results)
    single.load_checkpoint(tmp_path / "saved" / "one")
    same(losses_of(single), results[0][2:])

"""Evaluations during training, and batches of several shapes.

Judged by the unsharded model in plain torch, in float64: the same steps, and `model.eval()` between
them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, BatchError, CheckpointError, ProgramError
from autopar.pins import data_parallel, megatron
from autopar.runtime.calls.input_parts import Part
from autopar.runtime.checkpoint.holder import loader_state, saved_loader
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.pipeline.pipeline_program import _scalar
from tests.support.one_process import compare_step, compare_weights
from tests.support.ranks import run_ranks

LINE = "cpu: data=2 @1TB/s 1ns"
GRID = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": (LINE, {"pins": data_parallel("data"), "state": "ddp"}),
    "zero3": (LINE, {"pins": data_parallel("data"), "state": "zero3"}),
    "free": (LINE, {}),
    "megatron": (GRID, {"pins": [data_parallel("data"), megatron("tensor")]}),
    "free grid": (GRID, {}),
    "1f1b": (LINE, {"stages": 2, "microbatches": 4}),
    "interleaved": (
        GRID,
        {"stages": 4, "microbatches": 4, "schedule": "interleaved_1f1b chunks=2"},
    ),
}
STAGES = ("1f1b", "interleaved")
SIZES = (8, 5, 8, 1)  # rows of the batches of a ragged stream


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Classifier(nn.Module):
    """Dropout whose rate grows with the depth, a batch norm, and labels that may be missing."""

    def __init__(self, rates: tuple[float, ...]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.Sequential(*map(Block, rates))
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.norm(x)))
        if labels is None:
            return {"logits": logits}
        return {
            "loss": nn.functional.cross_entropy(logits, labels),
            "logits": logits,
            "correct": (logits.argmax(-1) == labels).sum(),
            "finite": logits.isfinite().all(),
        }


def classifier(*rates: float) -> Classifier:
    torch.manual_seed(0)
    return Classifier(rates).double()


def batch(rows: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(rows, 8, dtype=torch.float64, generator=generator),
        "labels": torch.randint(6, (rows,), generator=generator),
    }


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def evaluate_beside(way: str) -> None:
    """Steps with dropout and evaluations in turn; random numbers go on as without evaluations."""
    mesh, options = WAYS[way]
    model, alone = classifier(0.1, 0.3), classifier(0.1, 0.3)
    program = autopar.compile(model, mesh, optimizer=adam, **options)
    optimizer = adam(alone.parameters())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for number in range(3):
        torch.set_rng_state(state)
        loss = program.step(**batch(8, number))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        count, expected = 4 if way in STAGES else 1, torch.zeros((), dtype=torch.float64)
        parts = zip(*(value.chunk(count) for value in batch(8, number).values()), strict=True)
        for x, labels in parts:
            part = alone(x, labels)["loss"] / count
            part.backward()
            expected += part.detach()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        state = torch.get_rng_state()
        before = program.state_dict()
        alone.eval()
        with torch.no_grad():
            for rows in (8, 3):
                given = batch(rows, 10 + number)
                found, wanted = program.eval_step(**given), alone(**given)
                torch.testing.assert_close(found.loss, wanted["loss"], rtol=1e-9, atol=1e-12)
                whole = found.whole()
                torch.testing.assert_close(whole, wanted, rtol=1e-9, atol=1e-12)
                dtype, _, rest = found.layouts["logits"].partition("[")
                assert (dtype, rest.partition(",")[0].partition("@")[0]) == ("f64", str(rows))
            # Without labels, and by position.
            (only,) = program(given["x"]).values()
            torch.testing.assert_close(only, wanted["logits"], rtol=1e-9, atol=1e-12)
        alone.train()
        assert torch.equal(after, torch.get_rng_state())
        for name, value in program.state_dict().items():
            assert torch.equal(value, before[name]), name
    compare_weights(program, alone)


def train_ragged(way: str) -> None:
    mesh, options = WAYS[way]
    model, alone = classifier(0.0, 0.0), classifier(0.0, 0.0)
    for each in (model, alone):
        each.norm = nn.Identity()  # type: ignore[assignment]
    program = autopar.compile(model, mesh, optimizer=adam, shapes=3, clip_norm=0.5, **options)
    optimizer = adam(alone.parameters())
    for number, rows in enumerate(SIZES):
        loss = program.step(**batch(rows, number))
        expected = alone(**batch(rows, number))["loss"]
        expected.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        compare_step(loss, expected, optimizer)
    compare_weights(program, alone)
    with pytest.raises(BatchError, match="beyond the 3"):
        program.step(**batch(7, 0))
    loss = program.step(**batch(8, 9))  # and the program goes on
    assert loss.isfinite()


def evaluate_without_targets() -> None:
    """A loss_fn has no part in evaluations of batches that lack its arguments."""
    alone = classifier(0.0, 0.0)

    def loss_of(output: dict[str, Tensor], targets: Tensor, weight: float = 2.0) -> Tensor:
        return weight * nn.functional.cross_entropy(output["logits"], targets)

    given = batch(8, 0)
    x, targets = given["x"], given["labels"]
    program = autopar.compile(classifier(0.0, 0.0), LINE, optimizer=adam, loss_fn=loss_of)
    program.step(x, targets=targets)
    alone.load_state_dict(program.state_dict())
    alone.eval()
    (found,) = program(x).values()
    torch.testing.assert_close(found, alone(x)["logits"].detach(), rtol=1e-9, atol=1e-12)
    assert program.eval_step(x).loss is None
    loss = program.eval_step(x, targets=targets).loss
    torch.testing.assert_close(loss, loss_of(alone(x), targets).detach(), rtol=1e-9, atol=1e-12)
    with pytest.raises(BatchError, match="targets"):
        program.step(x)


def every_way(ways: tuple[str, ...]) -> None:
    for way in ways:
        evaluate_beside(way)
        train_ragged(way)


def differ() -> None:
    """A rank whose batch has another shape is named; nobody waits."""
    program = autopar.compile(classifier(0.0), LINE, optimizer=adam, shapes=2)
    program.step(**batch(8, 0))
    with pytest.raises(AutoparError, match="rank"):
        program.step(**batch(8 if dist.get_rank() == 0 else 6, 1))


def modes() -> None:
    evaluate_without_targets()
    model = classifier(0.2)
    program = autopar.compile(model, LINE, optimizer=adam)
    program.step(**batch(8, 0))
    assert program.eval().training is False
    with pytest.raises(ProgramError, match=r"program.train\(\)"):
        program.step(**batch(8, 0))
    one = program(**batch(8, 0))["logits"]
    program.train()
    assert torch.equal(one, program(**batch(8, 0))["logits"])
    model.eval()
    assert torch.equal(one, program(**batch(8, 0))["logits"])
    with pytest.raises(ProgramError, match="eval_step"):
        program.step(**batch(8, 0))
    assert not any(module.training for module in model.modules())
    model.train()
    with pytest.raises(BatchError, match="shapes"):
        program.step(**batch(6, 0))


def test_flags_of_microbatches_are_one_flag_only_if_they_agree() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    assert bool(_scalar("sure", [yes, yes]))
    with pytest.raises(BatchError, match="'sure' is true in some"):
        _scalar("sure", [yes, no])


def test_two_ranks() -> None:
    run_ranks(every_way, ("zero3", "1f1b"), count=2)


@pytest.mark.slow
def test_further_plans_on_two_ranks() -> None:
    run_ranks(every_way, ("data parallel", "free"), count=2)


@pytest.mark.slow
def test_further_plans_on_a_grid() -> None:
    run_ranks(every_way, ("megatron", "free grid", "interleaved"))


def test_ranks_whose_batches_differ_are_told_so() -> None:
    run_ranks(differ, count=2)


def test_modes() -> None:
    run_ranks(modes, count=2)


PARTED: dict[str, tuple[str, dict[str, Any]]] = {
    "every rank another part": (LINE, {"batches": "local"}),
    "zero3": (LINE, {"batches": "local", "state": "zero3", "pins": data_parallel("data")}),
    "over data": (
        GRID,
        {"batches": "local over data", "pins": [data_parallel("data"), megatron("tensor")]},
    ),
    "all of a grid": (GRID, {"batches": "local", "pins": [data_parallel("data")]}),
    "stages": (GRID, {"batches": "local", "stages": 2, "microbatches": 2}),
}


def train_parted(way: str) -> None:
    """Every rank passes its own rows; the reference has them all, in the order of the parts."""
    mesh, options = PARTED[way]
    model, alone = classifier(0.0, 0.0), classifier(0.0, 0.0)
    for each in (model, alone):
        each.norm = nn.Identity()  # type: ignore[assignment]
    program = autopar.compile(model, mesh, optimizer=adam, **options)
    optimizer = adam(alone.parameters())
    place = dist.get_rank()
    part, parts = {
        "over data": (place // 2, 2),
        "stages": (place % 2, 2),  # each is on half of the mesh
    }.get(way, (place, dist.get_world_size()))
    for number in range(3):
        whole = batch(8, number)
        own = {name: value.chunk(parts)[part] for name, value in whole.items()}
        loss = program.step(**own)
        assert (program.data_rank, program.data_world) == (part, parts)
        expected = alone(**whole)["loss"]
        expected.backward()
        compare_step(loss, expected, optimizer)
        with torch.no_grad():
            torch.testing.assert_close(
                program.eval_step(**own).loss, alone(**whole)["loss"], rtol=1e-9, atol=1e-12
            )
    compare_weights(program, alone)
    if way in ("over data", "stages"):  # ranks of one part that pass different ones
        wrong = {name: value.roll(dist.get_rank(), 0) for name, value in own.items()}
        with pytest.raises(BatchError, match="of rank"):
            program.step(**wrong)


class Scaled(nn.Module):
    """Scales features by a tensor that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x) * scale, labels)


def tensors_that_parts_share() -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    alone = copy.deepcopy(model)
    program = autopar.compile(model, LINE, batches="local")
    whole, scale = batch(8, 0), torch.arange(6.0, dtype=torch.float64)
    own = {name: value.chunk(2)[dist.get_rank()] for name, value in whole.items()}
    loss = program.step(**own, scale=scale)
    torch.testing.assert_close(loss, alone(**whole, scale=scale).detach(), rtol=1e-9, atol=1e-12)
    with pytest.raises(BatchError, match="'scale' of rank 1 is not that of rank 0"):
        program.step(**own, scale=scale + dist.get_rank())
    assert program.step(**own, scale=scale).isfinite()


class Shuffled:
    """Batches in a random order, with the state of one of torchdata's loaders."""

    def __init__(self, seed: int) -> None:
        self.random, self.read = torch.Generator().manual_seed(seed), 0

    def next(self) -> dict[str, Tensor]:
        self.read += 1
        return batch(4, int(torch.randint(1000, (), generator=self.random)))

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state(), "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])
        self.read = state["read"]


def loaders_resume(program: autopar.Session, path: Path) -> None:
    """Every rank has a loader in another state, which a checkpoint keeps in the middle of a run."""
    loader = Shuffled(dist.get_rank())
    program.step(**loader.next())
    program.save_checkpoint(path, loader=loader)
    losses = [program.step(**loader.next()) for _ in range(2)]
    other = Shuffled(7)
    program.load_checkpoint(path, loader=other)
    assert other.read == 1
    torch.testing.assert_close([program.step(**other.next()) for _ in range(2)], losses)
    with pytest.raises(CheckpointError, match="no loader is passed by rank 1"):
        program.save_checkpoint(path, loader=loader if dist.get_rank() == 0 else None)
    program.save_checkpoint(path)
    with pytest.raises(CheckpointError, match="has no loader"):
        program.load_checkpoint(path, loader=loader)


def parts_of_unequal_sizes(path: Path) -> None:
    tensors_that_parts_share()
    program = autopar.compile(classifier(0.0), LINE, batches="local")
    program.step(**batch(4, 0))
    with pytest.raises(BatchError, match="different sizes"):
        program.step(**batch(4 - dist.get_rank(), 1))
    assert program.step(**batch(4, 2)).isfinite()
    loaders_resume(program, path)
    ragged = autopar.compile(classifier(0.0), LINE, batches="local", shapes=2)
    ragged.step(**batch(4, 0))
    with pytest.raises(BatchError, match="different shapes") as caught:  # one of them is known
        ragged.step(**batch(4 - dist.get_rank(), 1))
    assert "passes labels i64[3], x f64[3, 8]; rank 0 passes labels i64[4]" in caught.value.why
    assert ragged.step(**batch(4, 2)).isfinite()


def parted(ways: tuple[str, ...]) -> None:
    for way in ways:
        train_parted(way)


def test_parts_of_a_batch_on_two_ranks() -> None:
    run_ranks(parted, ("every rank another part", "zero3"), count=2)


def test_parts_of_unequal_sizes_are_refused_and_loaders_resume(tmp_path: Path) -> None:
    run_ranks(parts_of_unequal_sizes, tmp_path / "one", count=2)


def test_loaders_of_another_number_of_parts_are_refused() -> None:
    index = Index({}, {"loader": saved_loader(Shuffled(0), Part(0, 1))})
    with pytest.raises(CheckpointError, match="other loaders") as caught:
        loader_state(index, Part(0, 2))
    assert caught.value.why.endswith("1 when it was saved, 2 now")


def test_parts_of_a_batch_on_a_grid() -> None:
    run_ranks(parted, ("over data", "stages"))


@pytest.mark.slow
def test_every_rank_of_a_grid_has_another_part_of_a_batch() -> None:
    run_ranks(parted, ("all of a grid",))

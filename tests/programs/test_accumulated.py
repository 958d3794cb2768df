"""Programs that add up the gradients of microbatches before an update, in one stage or two.

Judged by one process in plain torch, in float64: on the whole batch at once, and with dropout on
one microbatch after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError, OptionError, PlanMismatchError
from autopar.pins import data_parallel
from tests.support.ranks import run_ranks

LINE = "cpu: data=2 @1TB/s 1ns"
COUNT, WORDS = 4, 7
CASES: dict[str, dict[str, Any]] = {
    "free": {},
    "zero3": {"state": "zero3", "pins": data_parallel("data"), "clip_norm": 0.5},
    "local": {"batches": "local", "state": "zero2"},
    "tensor": {"pins": autopar.pins.megatron("data")},
    "stages": {"stages": 2, "microbatches": COUNT, "accumulate": 1},
}


class Tagger(nn.Module):
    """Tags words; padding has no tag."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head, self.drop = nn.Linear(8, 5), nn.Dropout(rate)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(words)
        x = x + self.drop(self.down(torch.relu(self.up(x))))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tagger(rate: float = 0.0) -> Tagger:
    torch.manual_seed(0)
    return Tagger(rate).double()


def batch(number: int, rows: int = 8) -> dict[str, Tensor]:
    """A batch whose rows have from one to six tags."""
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (rows, 6), generator=generator)
    labels = torch.randint(5, (rows, 6), generator=generator)
    ends = torch.randint(1, 7, (rows, 1), generator=generator)
    return {"words": words, "labels": labels.where(torch.arange(6) < ends, -100)}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def own_part(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.chunk(2)[dist.get_rank()] for name, value in whole.items()}


def close(one: Tensor | None, other: Tensor) -> None:
    torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-12)


def train(case: str) -> None:
    """Trains like plain torch on whole batches, and evaluates in between."""
    alone = tagger()
    options = {"accumulate": COUNT, **CASES[case]}
    program = autopar.compile(tagger(), LINE, optimizer=adam, shapes=2, **options)
    optimizer = adam(alone.parameters())
    for number in range(3):
        whole = batch(number)
        given = own_part(whole) if case == "local" else whole
        evaluated = program.eval_step(**given)
        close(evaluated.loss, alone(**whole)["loss"])
        close(evaluated.whole()["logits"], alone(**whole)["logits"])
        loss = program.step(**given)
        expected = alone(**whole)["loss"]
        expected.backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(alone.parameters(), options["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        close(loss, expected)
    for name, value in alone.state_dict().items():
        close(program.state_dict()[name], value)
    assert program.plan.microbatches == COUNT
    assert "COUNTS" in program.source
    if case == "free":  # a last, smaller batch divides into fewer microbatches
        close(program.step(**batch(9, rows=6)), alone(**batch(9, rows=6))["loss"])
        with pytest.raises(BatchError):
            program.step(words=batch(0)["words"])
    program.close()


def drop() -> None:
    """Draws masks as one process does that runs one microbatch after the other."""
    program = autopar.compile(tagger(0.3), LINE, optimizer=adam, accumulate=COUNT)
    alone = tagger(0.3)
    optimizer = adam(alone.parameters())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for number in range(2):
        whole = batch(number)
        torch.set_rng_state(state)
        loss = program.step(**whole)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        expected = torch.zeros((), dtype=torch.float64)
        for words, labels in zip(*(value.chunk(COUNT) for value in whole.values()), strict=True):
            share = (labels != -100).sum() / (whole["labels"] != -100).sum().double()
            part = alone(words, labels)["loss"] * share
            part.backward()
            expected += part.detach()
        optimizer.step()
        optimizer.zero_grad()
        close(loss, expected)
        assert torch.equal(after, torch.get_rng_state())
        state = after
    program.close()


def keep(folder: Path) -> None:
    """A plan on file, and a program on file, accumulate as the ones that were saved."""
    plan = autopar.plan(tagger(), LINE, example_inputs=batch(0), accumulate=COUNT)
    again = autopar.Plan.from_toml(plan.to_toml())
    expected = tagger()(**batch(0))["loss"]
    with autopar.compile(tagger(), LINE, optimizer=adam, plan=again) as program:
        close(program.step(**batch(0)), expected)
        if dist.get_rank() == 0:
            program.compiled.save(folder / "compiled")
    dist.barrier()
    with autopar.load(folder / "compiled", tagger(), optimizer=adam) as program:
        close(program.step(**batch(0)), expected)
    with pytest.raises(PlanMismatchError, match="accumulates 4"):
        autopar.compile(tagger(), LINE, optimizer=adam, plan=again, accumulate=2)


def on_two(folder: Path) -> None:
    for case in CASES:
        train(case)
    drop()
    keep(folder)


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_two, tmp_path, count=2)


def test_the_plan_prices_memory_of_one_microbatch() -> None:
    given = {"example_inputs": batch(0, rows=512), "pins": data_parallel("data"), "state": "ddp"}
    whole = autopar.plan(tagger(), LINE, **given)
    cut = autopar.plan(tagger(), LINE, accumulate=COUNT, **given)
    assert cut.predicted.peak_bytes < whole.predicted.peak_bytes / 2
    assert cut.stages[0].asked.whole_loss


def test_what_contradicts_it_is_refused() -> None:
    for options in ({"microbatches": 2}, {"stages": "auto"}):
        with pytest.raises(OptionError):
            autopar.plan(tagger(), LINE, example_inputs=batch(0), accumulate=2, **options)

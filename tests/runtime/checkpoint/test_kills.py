"""Ranks that are killed during a save: the last good checkpoint stays, and training resumes.

python -m pytest tests/runtime/checkpoint/test_kills.py -m slow     # 30 kills
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import CheckpointError, RankFailedError
from autopar.pins import data_parallel, fsdp
from autopar.runtime.checkpoint import safetensors_files as storage
from tests.runtime.ranks.test_failure import COUNT, run
from tests.support.models import Mlp
from tests.support.ranks import run_ranks

GRID = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"pins": [fsdp("data", "tensor")]},
    "pipelined": {"stages": 2, "microbatches": 2},
    "asynchronous": {"pins": [data_parallel()], "state": "zero3"},
}
BATCH = torch.arange(64.0).reshape(8, 8).sin()
# What a save does to the disk, by the names that Python's auditing has for it.
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.chmod")


class Audit:
    """Counts what this process does to a folder and kills it at one operation."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.fatal = str(folder), 0, 0
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and any(self.folder in str(arg) for arg in args[:2]):
            self.step()

    def step(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def make(kind: str, seed: int) -> autopar.Session:
    torch.manual_seed(seed)
    return autopar.compile(
        Mlp((8, 16, 16, 4)).double(),
        GRID,
        loss_fn=lambda y: y.square().mean(),
        example_inputs=BATCH.double(),
        optimizer=torch.optim.AdamW,
        **KINDS[kind],
    )


def state_of(program: autopar.Session) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in program.state_dict().items()}


def play(rank: int, folder: Path) -> None:
    """Save, go on, and save again, which one rank does not survive."""
    asked = json.loads((folder / "asked.json").read_text())
    draw = random.Random(asked["seed"])
    victim = draw.randrange(COUNT)
    program = make(asked["kind"], 0)
    program.step(BATCH.double())
    saves = folder / "saves"
    audit = Audit(saves)
    write = storage.save_file

    def halves(tensors: dict[str, Tensor], path: Path) -> None:
        write(tensors, path)
        size = path.stat().st_size
        os.truncate(path, size // 2)  # as it is in the middle of being written
        audit.step()
        os.truncate(path, size)
        write(tensors, path)

    storage.save_file = halves
    program.save_checkpoint(saves / "one")
    audit.count = 0
    program.save_checkpoint(saves / "one")  # as many operations as the one that follows
    operations, audit.count = audit.count, 0
    first = state_of(program)
    program.step(BATCH.double())
    second = state_of(program)
    if rank == 0:
        torch.save(first, folder / "first.pt")
        torch.save(second, folder / "second.pt")
    if rank == victim:
        audit.fatal = draw.randint(1, operations)
        (folder / "victim.json").write_text(json.dumps([rank, audit.fatal, operations]))
    try:
        saving = program.save_checkpoint(
            saves / "one", asynchronous=asked["kind"] == "asynchronous"
        )
        if draw.random() < 0.5:
            saving.result()
        for _ in range(1000):  # until it meets the loss
            program.step(BATCH.double())
    except (CheckpointError, RankFailedError) as error:
        (folder / f"{rank}.error").write_text(str(error))


def resume(folder: str, kind: str) -> dict[str, Tensor]:
    """A new job loads what is there, trains, and saves again."""
    program = make(kind, 5)
    program.load_checkpoint(Path(folder) / "saves" / "one")
    loaded = state_of(program)
    program.step(BATCH.double())
    program.save_checkpoint(Path(folder) / "saves" / "one")
    return loaded


def kill_once(seed: int, kind: str, folder: Path) -> str:
    folder.mkdir()
    (folder / "saves").mkdir()
    (folder / "asked.json").write_text(json.dumps({"seed": seed, "kind": kind}))
    ends = run(play, folder, "file")
    victim, at, operations = json.loads((folder / "victim.json").read_text())
    assert ends[victim].status == -signal.SIGKILL, ends[victim].stderr
    loaded = autopar.load_checkpoint(folder / "saves" / "one")
    first, second = (torch.load(folder / f"{which}.pt") for which in ("first", "second"))
    which = "first" if all(torch.equal(loaded[k], first[k]) for k in first) else "second"
    expected = {"first": first, "second": second}[which]
    assert all(torch.equal(loaded[k], expected[k]) for k in expected)
    for rank in set(range(COUNT)) - {victim}:
        said = ends[rank].stderr
        if (folder / f"{rank}.error").exists():
            said += (folder / f"{rank}.error").read_text()
        assert f"rank {victim} was lost" in said, f"rank {rank} says {said!r}"
    for state in run_ranks(resume, str(folder), kind):
        assert all(torch.equal(state[k], expected[k]) for k in expected)
    # What the dead have left is gone.
    saves = folder / "saves"
    assert [entry.name for entry in saves.iterdir()] == ["one"]
    assert len(list((saves / "one").iterdir())) == 2
    return f"{kind}: rank {victim} at operation {at} of {operations}: {which}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_is_killed_while_it_saves(seed: int, kind: str, tmp_path: Path) -> None:
    print(kill_once(seed, kind, tmp_path / "run"))

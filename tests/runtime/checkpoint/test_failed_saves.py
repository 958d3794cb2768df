"""Saves that fail: at every disk operation, with an unread error, or with non-finite values."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import CheckpointError
from autopar.files import atomic
from autopar.runtime.checkpoint import safetensors_files as storage
from tests.runtime.checkpoint.test_checkpoint import contents, small, trained
from tests.runtime.checkpoint.test_interleavings import load, save
from tests.runtime.checkpoint.turns import Actor, Turns, stepping
from tests.support.ranks import run_ranks

# At every operation ------------------------------------------------------------------------------


class Failing(Turns):
    """Operation `at` finds the disk full."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at

    def step(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        self.time += 1
        if self.time == self.at and name != "close":
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*args, **kwargs)


def error_of(call: Any) -> CheckpointError | None:
    try:
        call()
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_a_disk_that_fails_at_any_operation(there: bool, tmp_path: Path) -> None:
    """The old one or the new one is there, whole; where it failed before that, nothing else."""
    failures = 0
    for at in range(1, 1000, 2):
        path = tmp_path / str(at) / "one"
        path.parent.mkdir()
        if there:
            save(path, 0)
        before = contents(path)
        turns = Failing(at)
        with stepping(turns):
            error = error_of(lambda p=path: save(p, 1))
        if turns.time < at:
            break
        number, _ = load(path)
        assert number in ({0, 1} if there else {-1, 1})
        assert error is None or "No space left" in error.why
        failures += error is not None
        if number != 1:
            assert error is not None
            assert contents(path) == before
        save(path, 2)
        assert load(path) == (2, 3)
        assert len(list(path.rglob("*"))) == 3
        assert len(list(path.parent.iterdir())) == 1
    assert failures > 5


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_a_job_that_dies_at_any_operation(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one clears away what it has left, once it is known to be dead."""
    for at in range(1, 1000, 2):
        path = tmp_path / str(at) / "one"
        path.parent.mkdir()
        if there:
            save(path, 0)
        turns, actor = Turns(at), Actor(lambda p=path: save(p, 1), dies=at, name=1)
        with stepping(turns):
            turns.run([actor])
        assert load(path)[0] in ({0, 1} if there else {-1, 1})
        if not actor.dead:
            break
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "_DAY", -1.0)  # of what it had not yet put its name to
            save(path, 2)
        assert load(path) == (2, 3)
        assert len(list(path.rglob("*"))) == 3
        assert len(list(path.parent.iterdir())) == 1
    assert at > 10


def test_drafts_of_the_living_and_of_other_machines_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    save(path, 1)
    living, dead = atomic.Draft(path), atomic.Draft(path)
    dead.abandon = lambda: None
    atomic.os.close(dead._lock)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_machine", lambda: "another")
        foreign = atomic.Draft(path)
    save(path, 2)
    left = {entry.name for entry in path.iterdir() if entry.is_dir()}
    assert {living.folder.name, foreign.folder.name} < left
    assert dead.folder.name not in left
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_DAY", -1.0)
        save(path, 3)
    left = {entry.name for entry in path.iterdir() if entry.is_dir()}
    assert living.folder.name in left
    assert foreign.folder.name not in left
    assert load(path) == (3, 3)


# Unheard -----------------------------------------------------------------------------------------


def full(tensors: Any, path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_that_nobody_asked_for_is_raised_by_who_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = small()
    trained(program)
    path = program.save_checkpoint(tmp_path / "one").result()
    following = [
        lambda: program.save_checkpoint(tmp_path / "next"),
        lambda: program.save_checkpoint(tmp_path / "next", asynchronous=True).result(),
        lambda: program.load_checkpoint(path),
        lambda: program.load_weights(path),
        lambda: program._checkpoints().close(),
    ]
    for follow in following:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "save_file", full)
            program.save_checkpoint(tmp_path / "lost", asynchronous=True)
            program._checkpoints()._last._future.exception()
        with pytest.raises(CheckpointError, match="lost cannot be written"):
            follow()
        follow()  # once is enough
    assert not (tmp_path / "lost").exists()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "save_file", full)
        saving = program.save_checkpoint(tmp_path / "lost", asynchronous=True)
        with pytest.raises(CheckpointError, match="lost cannot be written"):
            saving.result()
    program.load_checkpoint(path)


PROGRAM = """
from tests.runtime.checkpoint.test_failed_saves import full, small, storage
program = small()
storage.save_file = full
saving = program.save_checkpoint({path!r}, asynchronous=True)
"""
# The handle of such a save, without the program, whose compiler takes seconds to import.
HANDLE = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.saving import Saving

def write():
    raise CheckpointError("lost cannot be written")

saving = Saving(Path({path!r}), ThreadPoolExecutor(1).submit(write), None)
"""
END = """
if {asked}:
    try:
        saving.result()
    except Exception:
        pass
print("the end of the run")
"""


@pytest.mark.parametrize(
    ("begin", "asked"),
    [
        pytest.param(PROGRAM, False, marks=pytest.mark.slow),
        pytest.param(PROGRAM, True, marks=pytest.mark.slow),
        (HANDLE, False),
    ],
    ids=["program", "program, asked", "handle"],
)
def test_a_failure_that_nobody_ever_asks_for_is_the_last_word(
    begin: str, asked: bool, tmp_path: Path
) -> None:
    script = (begin + END).format(path=str(tmp_path / "lost"), asked=asked)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "the end of the run\n"
    assert done.returncode == (0 if asked else 1), done.stderr
    assert ("lost cannot be written" in done.stderr) != asked


def nobody_asks(folder: str) -> str:
    """Rank 1 cannot write; only rank 0 asks. All hear of it at the next save, and go on."""
    path = Path(folder)
    parts = {"x": torch.arange(32.0).reshape(4, 8)}
    torch.manual_seed(0)
    program = autopar.compile(
        torch.nn.Sequential(torch.nn.Linear(8, 4)),
        "cpu: data=2",
        loss_fn=lambda y: y.square().mean(),
        example_inputs=parts["x"],
        state="zero3",
    )
    program.step(parts["x"])
    write = storage.save_file
    if dist.get_rank() == 1:
        storage.save_file = full
    saving = program.save_checkpoint(path / "lost", asynchronous=True)
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError):
            saving.result()
    saving._future.exception()
    storage.save_file = write
    with pytest.raises(CheckpointError, match="lost cannot be written") as caught:
        program.save_checkpoint(path / "next")
    program.save_checkpoint(path / "next").result()
    return str(caught.value)


def test_all_ranks_hear_the_same_of_a_failure(tmp_path: Path) -> None:
    first, second = run_ranks(nobody_asks, str(tmp_path), count=2)
    assert first == second
    assert "rank 1, rank_1.safetensors" in first
    assert [entry.name for entry in tmp_path.iterdir()] == ["next"]


# Not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_what_is_not_finite_replaces_nothing(number: float, tmp_path: Path) -> None:
    program = small()
    trained(program, 3)
    path = program.save_checkpoint(tmp_path / "one").result()
    before = contents(path)
    optimizer, state = program.optimizer, program.state_dict()
    state["layers.1.bias"][1] = number
    program._ready()._load(state)
    for place in (path, tmp_path / "other"):
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError) as caught:
                program.save_checkpoint(place, asynchronous=asynchronous).result()
            assert caught.value.what == "layers.1.bias is not finite after step 3"
    assert contents(path) == before
    assert len(list(tmp_path.iterdir())) == 1
    assert optimizer is program.optimizer
    program.save_checkpoint(path, allow_nonfinite=True)
    found = autopar.load_checkpoint(path)
    torch.testing.assert_close(found, state, rtol=0, atol=0, equal_nan=True)


def test_infinite_buffers_are_no_fault(tmp_path: Path) -> None:
    """Masks of attention hold them."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(8, 8)
            self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.fc(x) + self.mask[0], -1).square().mean()

    program = autopar.compile(Masked(), "cpu: x=1", example_inputs={"x": torch.ones(4, 8)})
    program.save_checkpoint(tmp_path / "one")
    assert torch.isinf(autopar.load_checkpoint(tmp_path / "one")["mask"]).any()

"""Programs saved as folders run by themselves, and are written completely or not at all."""

from __future__ import annotations

import functools
import io
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import autopar
from autopar.errors import ProgramError
from autopar.files import atomic
from autopar.runtime import folder
from tests.runtime.checkpoint.turns import Actor, Turns, stepping
from tests.support.models import gpt2
from tests.support.ranks import run_ranks

PAIR = "cpu: tensor=2 @1TB/s 1ns"
SINGLE = "cpu: x=1"
FILES = {
    "program.py",
    "plan.toml",
    "graph.txt",
    "program.toml",
    "weights.safetensors",
    "batch.safetensors",
}


def save_and_train(path: str) -> tuple[list[str], bool]:
    """Losses of ten steps after saving, as the saved program prints them; whether it is sharded."""
    torch.manual_seed(0)
    model, batch = gpt2()
    program = autopar.compile(
        model.double(),
        PAIR,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.9)),
        clip_norm=0.5,
        example_inputs=batch,
    )
    # One rank writes; that it cannot is an error of all.
    with pytest.raises(ProgramError, match="cannot write"):
        program.save(__file__)
    program.save(path)
    losses = [f"{program.step(**batch).item():.6f}" for _ in range(10)]
    return losses, "96@" in program.source or "32@" in program.source


def printed_by(target: str) -> str:
    """Returns what a saved program prints that this rank runs as a script."""
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(f"{target}/program.py", run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize("launcher", ["forks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_saved_program_trains_by_itself(launcher: str, tmp_path: Path) -> None:
    target = tmp_path / "out" / "program"
    results = run_ranks(save_and_train, str(target), count=2)
    losses, sharded = results[0]
    assert sharded
    assert all(result == results[0] for result in results)
    assert {file.name for file in target.iterdir()} == FILES
    # Tied weights are saved once.
    assert "lm_head.weight" not in load_file(target / "weights.safetensors")
    if launcher == "forks":
        printed = run_ranks(printed_by, str(target), count=2)[0]
    else:
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        printed = run(sys.executable, *launch, str(target / "program.py"))
    steps = [line.split() for line in printed.splitlines() if line.startswith("step")]
    assert [step[3] for step in steps] == losses


def run(*command: str) -> str:
    # A folder of its own: nothing of the project is imported by way of the working directory.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def small() -> tuple[autopar.Session, dict[str, torch.Tensor]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return autopar.compile(model, SINGLE, example_inputs=torch.randn(2, 4)), model.state_dict()


def contents(target: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in target.iterdir() if file.is_file()}


def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, weights = small()
    target = program.save(tmp_path / "program")
    before = contents(target)
    assert set(before) == FILES

    written = []

    def full_disk(tensors: Any, path: Path) -> None:
        written.append(path)
        path.write_bytes(b"half of")
        raise OSError("no space left on device")

    program.load_state_dict({name: value + 1 for name, value in weights.items()})
    with monkeypatch.context() as patch:
        patch.setattr(folder, "save_file", full_disk)
        for path in (target, tmp_path / "fresh"):
            with pytest.raises(ProgramError, match="cannot write") as caught:
                program.save(path)
            assert "no space left" in caught.value.why
    assert len(written) == 2
    assert contents(target) == before
    assert list(tmp_path.iterdir()) == [target]

    program.save(target)
    assert contents(target) != before
    saved = load_file(target / "weights.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value + 1)


def test_a_save_keeps_files_of_other_names(tmp_path: Path) -> None:
    program, _ = small()
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    program.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {*FILES, "notes.txt"}


def test_two_saves_into_one_folder_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused while the first is at work; who opens it meanwhile is told."""
    program, _ = small()
    target = program.save(tmp_path / "program")
    write, before = folder.save_file, contents(target)
    refusals = []

    def meanwhile(tensors: Any, path: Path) -> None:
        write(tensors, path)
        with pytest.raises(ProgramError, match="another job") as caught:
            folder.write(target, {"program.toml": "half of another"}, {})
        refusals.append(caught.value)
        assert contents(target) == before

    with monkeypatch.context() as patch:
        patch.setattr(folder, "save_file", meanwhile)
        program.save(target)
    assert len(refusals) == 2
    load = folder.load_file

    def replaced(path: Path) -> Any:
        monkeypatch.undo()
        program.save(target)
        return load(path)

    monkeypatch.setattr(folder, "load_file", replaced)
    with pytest.raises(ProgramError, match="was replaced"):
        folder.open_program(str(target / "program.py")).__enter__()
    folder.open_program(str(target / "program.py")).__enter__()
    assert contents(target) == before


def test_a_save_that_dies_is_not_taken_for_a_whole(tmp_path: Path) -> None:
    """Whatever file it had come to: all old, all new, or refused; a checkpoint beside it stays."""
    program, _ = small()
    for at in range(1, 1000, 3):
        target = tmp_path / str(at) / "program"
        target.parent.mkdir()
        program.save_checkpoint(target)
        program.save(target)
        old = {name: (target / name).stat().st_ino for name in FILES}
        turns = Turns(at)
        dying = Actor(lambda path=target: program.save(path), dies=at)
        with stepping(turns):
            turns.run([dying])
        new = {name: (target / name).stat().st_ino for name in FILES if (target / name).exists()}
        if "program.toml" in new:
            assert len({new[name] == old[name] for name in FILES}) == 1
        if not dying.dead:
            break
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(atomic, "_DAY", -1.0)
            program.save(target)
        names = {entry.name for entry in target.iterdir() if not entry.name.startswith("save-")}
        assert names == {*FILES, "checkpoint.json"}
        autopar.load_checkpoint(target)
    assert at > 10


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    program = autopar.compile(
        model,
        SINGLE,
        loss_fn=lambda output: output.square().mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        example_inputs=torch.randn(2, 4),
    )
    program.save(tmp_path)
    file = str(tmp_path / "program.py")
    with folder.open_program(file) as opened:
        torch.testing.assert_close(
            opened.step(opened.example), program.step(opened.example["input"])
        )
        (group,) = opened.executor.optimizer.param_groups
        assert group["lr"] == 0.5
    text = (tmp_path / "program.toml").read_text(encoding="utf-8")
    (tmp_path / "program.toml").write_text(text.replace("SGD", "Optimizer9"), encoding="utf-8")
    with pytest.raises(ProgramError, match="Optimizer9"), folder.open_program(file):
        pass
    (tmp_path / "program.toml").write_text(text, encoding="utf-8")
    for name in sorted(FILES - {"graph.txt", "plan.toml"}):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"\xff[" + whole[: len(whole) // 2])
        with pytest.raises(ProgramError, match=rf"{name} cannot be read|cannot read .*{name}"):
            folder.open_program(file).__enter__()
        (tmp_path / name).unlink()
        with pytest.raises(ProgramError, match=f"{name} is missing"):
            folder.open_program(file).__enter__()
        (tmp_path / name).write_bytes(whole)

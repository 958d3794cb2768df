"""Checkpoints in one process: the folder, optimizers, weights."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import resource
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CheckpointError
from tests.support.models import Mlp

SINGLE = "cpu: x=1"
NOBODY = 65534
BATCH = torch.arange(32.0).reshape(4, 8).sin()


# The folder --------------------------------------------------------------------------------------


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def small(
    optimizer: Any = torch.optim.AdamW,
    seed: int = 0,
    sizes: tuple[int, ...] = (8, 5, 3),
    **options: Any,
) -> autopar.Session:
    torch.manual_seed(seed)
    return autopar.compile(
        Mlp(sizes), SINGLE, loss_fn=loss_of, optimizer=optimizer, example_inputs=BATCH, **options
    )


def trained(program: autopar.Session, steps: int = 2) -> list[Tensor]:
    return [program.step(BATCH) for _ in range(steps)]


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A checkpoint after two steps, and the two losses that follow."""
    program = small()
    trained(program)
    path = program.save_checkpoint(tmp_path_factory.mktemp("saved") / "one").result()
    return path, trained(program)


def test_what_is_damaged_is_refused_and_changes_nothing(
    saved: tuple[Path, list[Tensor]], tmp_path: Path
) -> None:
    path, losses = saved
    program = small(seed=1)
    before = {k: v.clone() for k, v in program.state_dict().items()}
    files = contents(path)
    rank = next(name for name in files if re.fullmatch(r"save-\w{16}/rank_0\.safetensors", name))
    assert set(files) == {"checkpoint.json", rank}
    data, text = files[rank], files["checkpoint.json"]
    flipped = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    damages = {
        rank: [data[: len(data) // 2], flipped, b"", None],
        "checkpoint.json": [text[:-40], text.replace(b"0.001", b"0.002"), b"[]", None],
    }
    assert b"0.001" in text  # the learning rate
    for name, versions in damages.items():
        for version in versions:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            (folder / rank).parent.mkdir(parents=True)
            for file, content in {**files, name: version}.items():
                if content is not None:
                    (folder / file).write_bytes(content)
            for load in (program.load_checkpoint, program.load_weights, autopar.load_checkpoint):
                with pytest.raises(CheckpointError) as caught:
                    load(folder)
                what = "damaged|not a complete|no weights" if version is None else "damaged"
                assert re.search(what, caught.value.what)
    torch.testing.assert_close(program.state_dict(), before, rtol=0, atol=0)
    assert not program.optimizer.state
    program.load_checkpoint(path)
    assert trained(program) == losses


def test_loading_unpickles_nothing(
    saved: tuple[Path, list[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, losses = saved
    program = small(seed=1)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    program.load_checkpoint(path)
    assert trained(program) == losses
    autopar.load_checkpoint(path)
    # torch's own checkpoints hold a pickle.
    (tmp_path / ".metadata").write_bytes(b"c")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        program.load_checkpoint(tmp_path)


@contextmanager
def full_disk(room: int = 1000) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    program = small()
    trained(program)
    path = program.save_checkpoint(tmp_path / "one").result()
    before = contents(path)
    losses = trained(program)
    for target in (path, tmp_path / "other"):
        for asynchronous in (False, True):
            with full_disk(), pytest.raises(CheckpointError, match="cannot be written") as caught:
                program.save_checkpoint(target, asynchronous=asynchronous).result()
            assert "os error 27" in caught.value.why
    with pytest.raises(CheckpointError, match="cannot be written"):
        program.save_checkpoint(path / "checkpoint.json" / "in a file")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    other = tmp_path / "another program's"
    other.mkdir()
    (other / "checkpoint.json").write_text('{"steps": 12}')
    for place in (mine, other, mine / "notes.txt"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            program.save_checkpoint(place)
    with pytest.raises(CheckpointError, match="checkpoint of another model"):
        small(sizes=(8, 6, 3)).save_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"values\['net'\]"):
        program.save_checkpoint(path, values={"net": program})
    assert contents(path) == before
    assert contents(mine) == {"notes.txt": b"keep"}
    assert contents(other) == {"checkpoint.json": b'{"steps": 12}'}
    assert {file.name for file in tmp_path.iterdir()} == {"one", "mine", other.name}
    program.load_checkpoint(path)
    assert trained(program) == losses


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Inside, this process may not write into a folder; root becomes nobody, bound by modes."""
    user = os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_folder_that_is_read_only_is_named_and_keeps_what_it_holds() -> None:
    program = small()
    trained(program)
    with tempfile.TemporaryDirectory() as name:  # not below a folder that only root may enter
        folder = Path(name)
        path = program.save_checkpoint(folder / "one").result()
        before, losses = contents(path), trained(program)
        with read_only(folder):
            for target in (path, folder / "other"):
                for asynchronous in (False, True):
                    with pytest.raises(CheckpointError, match="cannot be written") as caught:
                        program.save_checkpoint(target, asynchronous=asynchronous).result()
                    assert "Permission denied" in caught.value.why
        assert contents(path) == before
        assert [file.name for file in folder.iterdir()] == ["one"]
        program.load_checkpoint(path)
        assert trained(program) == losses


def test_a_folder_of_the_old_form_is_read_and_replaced(tmp_path: Path) -> None:
    """Older versions wrote files next to checkpoint.json; what a user put there stays."""
    program = small()
    path = program.save_checkpoint(tmp_path / "one").result()
    first = {k: v.clone() for k, v in program.state_dict().items()}
    (folder,) = path.glob("save-*")
    (folder / "rank_0.safetensors").rename(path / "rank_0.safetensors")
    folder.rmdir()
    document = json.loads((path / "checkpoint.json").read_text())
    for stored in document["content"]["tensors"].values():
        for chunk in stored["chunks"]:
            chunk[2] = "rank_0.safetensors"
    document["checksum"] = zlib.crc32(json.dumps(document["content"], sort_keys=True).encode())
    (path / "checkpoint.json").write_text(json.dumps(document))
    (path / "notes.txt").write_text("keep")
    torch.testing.assert_close(autopar.load_checkpoint(path), first, rtol=0, atol=0)
    trained(program)
    program.save_checkpoint(path)
    torch.testing.assert_close(autopar.load_checkpoint(path), program.state_dict(), rtol=0, atol=0)
    names = {file.name for file in path.iterdir()}
    assert names == {"checkpoint.json", "notes.txt", *(f.name for f in path.glob("save-*"))}
    assert len(names) == 3


def test_an_asynchronous_save_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    program = small()
    trained(program)
    saving = program.save_checkpoint(tmp_path / "one", asynchronous=True)
    losses = trained(program)
    assert saving.result() == tmp_path / "one"
    assert saving.done()
    other = small(seed=1)
    other.load_checkpoint(tmp_path / "one")
    assert trained(other) == losses


# Optimizers --------------------------------------------------------------------------------------

OPTIMIZERS = [
    functools.partial(torch.optim.SGD, lr=0.1),
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    functools.partial(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    functools.partial(torch.optim.NAdam, lr=0.01),
    functools.partial(torch.optim.ASGD, lr=0.01),
    functools.partial(torch.optim.Rprop, lr=0.01),
    functools.partial(torch.optim.Adafactor, lr=0.01),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_optimizers_go_on_as_they_would(optimizer: Any, tmp_path: Path) -> None:
    program = small(optimizer)
    trained(program)
    for group in program.optimizer.param_groups:
        group["lr"] = group["lr"] / 2
    program.save_checkpoint(tmp_path / "one")
    losses = trained(program, 3)
    other = small(optimizer, seed=1)
    trained(other, 1)
    other.load_checkpoint(tmp_path / "one")
    assert trained(other, 3) == losses


def test_groups_are_known_by_their_parameters(tmp_path: Path) -> None:
    def decayed(parameters: Any) -> torch.optim.Optimizer:
        known = list(parameters)
        matrices = [p for p in known if p.dim() > 1]
        others = [p for p in known if p.dim() < 2]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01)

    def turned(parameters: Any) -> torch.optim.Optimizer:
        optimizer = decayed(parameters)
        optimizer.param_groups.reverse()
        return optimizer

    program = small(decayed)
    trained(program)
    program.save_checkpoint(tmp_path / "one")
    losses = trained(program)
    other = small(turned, seed=1)
    other.load_checkpoint(tmp_path / "one")
    assert trained(other) == losses
    with pytest.raises(CheckpointError, match="groups differ from those"):
        small().load_checkpoint(tmp_path / "one")
    with pytest.raises(CheckpointError, match="trains with SGD"):
        small(functools.partial(torch.optim.SGD, lr=0.1)).load_checkpoint(tmp_path / "one")


# Models and weights ------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two linears with one weight, which goes by the name of the linear that is made first."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.arange(64.0).reshape(8, 8).cos() / 4)
        for name in names:
            linear = nn.Linear(8, 8, bias=False)
            linear.weight = weight
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("head")(self.get_submodule("embed")(x).tanh())


def test_all_state_of_tied_weights_is_found_under_either_name(tmp_path: Path) -> None:
    losses = []
    options: dict[str, Any] = {"loss_fn": loss_of, "optimizer": torch.optim.AdamW, "ema": 0.5}
    for names in (("embed", "head"), ("head", "embed")):
        program = autopar.compile(Tied(*names), SINGLE, example_inputs=BATCH, **options)
        if losses:
            program.load_checkpoint(tmp_path / "one")
        else:
            trained(program)
            program.save_checkpoint(tmp_path / "one").result()
        losses.append([*trained(program), program.ema_state_dict()["head.weight"]])
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def test_averages_that_a_checkpoint_lacks_begin_with_its_parameters(tmp_path: Path) -> None:
    """A parameter that was frozen when the others were averaged."""
    torch.manual_seed(0)
    frozen = Mlp((8, 5, 3))
    frozen.layers[0].weight.requires_grad_(False)
    options: dict[str, Any] = {"loss_fn": loss_of, "optimizer": torch.optim.AdamW, "ema": 0.5}
    program = autopar.compile(frozen, SINGLE, example_inputs=BATCH, **options)
    trained(program)
    program.save_checkpoint(tmp_path / "one").result()
    other = small(seed=1, ema=0.5)
    other.load_checkpoint(tmp_path / "one")
    found, averages = other.state_dict(), other.ema_state_dict()
    assert torch.equal(averages["layers.0.weight"], found["layers.0.weight"])
    assert torch.equal(averages["layers.0.bias"], program.ema_state_dict()["layers.0.bias"])
    assert not torch.equal(averages["layers.0.bias"], found["layers.0.bias"])


def test_another_models_checkpoint_is_refused(saved: tuple[Path, list[Tensor]]) -> None:
    path, _ = saved
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        small(sizes=(8, 6, 3)).load_checkpoint(path)
    assert "mis-shaped: layers.0.weight [5, 8] instead of [6, 8]" in caught.value.why
    with pytest.raises(CheckpointError, match="missing: layers"):
        small(sizes=(8, 5, 3, 2)).load_checkpoint(path)
    with pytest.raises(CheckpointError, match="unexpected: layers"):
        small(sizes=(8, 5)).load_checkpoint(path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        small().load_checkpoint(path / "nowhere")
    program = small()
    rates = torch.optim.lr_scheduler.StepLR(program.optimizer, 1)
    with pytest.raises(CheckpointError, match="has no scheduler"):
        program.load_checkpoint(path, scheduler=rates)


def test_state_dicts_are_taken_under_other_names() -> None:
    program, other = small(seed=0), small(seed=1)
    values = {f"net.{name}": value for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="missing: layers"):
        program.load_weights(values)
    program.load_weights(values, rename=lambda name: f"net.{name}")
    torch.testing.assert_close(program.state_dict(), other.state_dict(), rtol=0, atol=0)
    del values["net.layers.0.weight"]
    with pytest.raises(CheckpointError, match=r"missing: layers\.0\.weight"):
        program.load_weights(values, rename=lambda name: f"net.{name}")


def test_a_scheduler_that_fails_is_named(tmp_path: Path) -> None:
    class Broken(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("rate")

    program = small()
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        program.save_checkpoint(tmp_path / "one", scheduler=Broken(program.optimizer, 1))
    assert "KeyError: 'rate'" in caught.value.why
    assert not list(tmp_path.iterdir())

"""Programs that one process compiles and saves, and others load."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, BatchError, MeshError, ProgramError
from tests.programs.test_adopted import CLIP, EMA, PROGRAMS, alone, optimizer_of, rates
from tests.programs.test_checkpoints import language
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module", params=["data parallel", "pipeline"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that a process without a group has compiled."""
    model, batch = language()
    mesh, options = PROGRAMS[request.param]
    compiled = autopar.emit(model, mesh, optimizer=optimizer_of, example_inputs=batch, **options)
    place = compiled.save(tmp_path_factory.mktemp("compiled") / "program")
    again = autopar.Compiled.load(place, model)
    assert again.fingerprint == compiled.fingerprint
    assert (again.plan, again.sources) == (compiled.plan, compiled.sources)
    return place


def loaded(place: Path, steps: int) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses and state of a program from a folder, and what it says to a batch of another size."""
    model, batch = language()
    with autopar.load(place, model, optimizer=optimizer_of, clip_norm=CLIP, ema=EMA) as session:
        with pytest.raises(BatchError) as refused:
            session.step(**{name: value[:4] for name, value in batch.items()})
        scheduler, losses = rates(session.optimizer), []
        for _ in range(steps):
            losses.append(session.step(**batch).item())
            scheduler.step()
        return losses, session.state_dict(), str(refused.value)


def test_a_loaded_program_trains_as_a_compiled_one(folder: Path) -> None:
    losses, state = alone(language, 3)
    for found, values, refused in run_ranks(loaded, folder, 3):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        for name, value in values.items():
            torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-12)
        assert "input_ids" in refused


class Scaled(nn.Module):
    """A model that is not told by its parameters alone."""

    def __init__(self, scale: float = 0.5, width: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.scale, self.inner = scale, nn.Linear(4, width)
        self.out = nn.Linear(4, width)
        if tied:
            self.out.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.out(x) * self.scale + activation(self.inner(x))).square().mean()


class Shifted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return (self.out(x) * self.scale + activation(self.inner(x + 1))).square().mean()


def activation(x: Tensor) -> Tensor:
    return torch.relu(x)


def another_activation(x: Tensor) -> Tensor:
    return torch.tanh(x)


def frozen(model: nn.Module) -> nn.Module:
    next(iter(model.parameters())).requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scaled") / "program"
    return autopar.emit(Scaled(), "cpu: x=1", example_inputs=torch.ones(2, 4)).save(place)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (lambda: Scaled(0.25), "the module itself was .*0.5.*, and is .*0.25"),
        (lambda: Scaled(width=5), r"the parameter inner.weight was float32\[4, 4\]"),
        (lambda: Scaled(tied=True), "the parameter out.weight .*tied to inner.weight"),
        (lambda: Scaled().eval(), "the module itself .*in evaluation"),
        (lambda: frozen(Scaled()), "the parameter inner.weight .*frozen"),
        (Shifted, "the model's class"),
        (lambda: nn.Sequential(Scaled()), "the model's class"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    scaled: Path, other: Callable[[], nn.Module], names: str
) -> None:
    with pytest.raises(ProgramError, match="for another model") as refused:
        autopar.load(scaled, other())
    assert re.search(names, refused.value.why), refused.value.why


def test_a_model_whose_code_changed_is_refused(
    scaled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that its class calls is another one; class, shapes and attributes are the same."""
    autopar.load(scaled, Scaled()).close()
    monkeypatch.setitem(globals(), "activation", another_activation)
    with pytest.raises(ProgramError, match="for another model") as refused:
        autopar.load(scaled, Scaled())
    assert "the code of" in refused.value.why


@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        ("compiled.toml", r'torch = "[^"]*"', 'torch = "2.1.0"', "another version of torch"),
        ("compiled.toml", "version = 1", "version = 7", "another version of format"),
        ("compiled.toml", "fingerprint", "finger", "finger"),
        ("stage_0.py", "def forward", "def  forward", "do not belong together"),
        ("graph.txt", "aten.relu", "aten.tanh", "do not belong together"),
        ("graph.txt", "%relu", "%tanh", "tanh|relu"),
        ("plan.toml", "graph", "grph", "no usable entry 'graph'"),
        ("call.json", '"positional": 1', '"positional": {}', "damaged"),
        ("call.json", "a tensor", "os:system", "damaged"),
    ],
)
def test_a_damaged_folder_is_refused(
    scaled: Path, tmp_path: Path, file: str, before: str, after: str, says: str
) -> None:
    place = tmp_path / "program"
    shutil.copytree(scaled, place)
    text = (place / file).read_text()
    changed = re.sub(before, after, text, count=1)
    assert changed != text
    (place / file).write_text(changed)
    with pytest.raises(AutoparError, match=says):
        autopar.load(place, Scaled())


def test_a_missing_file_is_named(scaled: Path, tmp_path: Path) -> None:
    for file in sorted(path.name for path in scaled.iterdir()):
        place = tmp_path / file
        shutil.copytree(scaled, place)
        (place / file).unlink()
        with pytest.raises(AutoparError, match=re.escape(file)):
            autopar.load(place, Scaled())
    with pytest.raises(AutoparError, match="nowhere"):
        autopar.load(tmp_path / "nowhere", Scaled())


def test_a_program_for_other_processes_is_refused(tmp_path: Path) -> None:
    batch = torch.ones(2, 4)
    place = autopar.emit(Scaled(), "cpu: x=2", example_inputs=batch).save(tmp_path / "two")
    with pytest.raises(MeshError, match="2 devices"):
        autopar.load(place, Scaled())

"""Programs that take over from one another in mid-training, and programs that were saved compiled.

Judged by the unsharded model in plain torch, trained without a break, in float64.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, BatchError, MeshError, ProgramError
from autopar.ir.mesh import Mesh
from autopar.pins import data_parallel, megatron
from tests.programs.test_checkpoints import language
from tests.support.ranks import run_ranks

GRID = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
LINE = "cpu: data=4 @1TB/s 1ns"
CLIP, EMA = 0.5, 0.9
# What takes over after every second step: mesh and options of each program.
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": (LINE, {"pins": data_parallel("data"), "state": "ddp"}),
    "pipeline": (LINE, {"stages": 2, "microbatches": 4, "schedule": "1f1b"}),
    "zero3": (LINE, {"pins": data_parallel("data"), "state": "zero3"}),
    "megatron": (GRID, {"pins": [data_parallel("data"), megatron("tensor")]}),
    "free": (GRID, {}),
    "interleaved": (GRID, {"stages": 4, "microbatches": 4, "schedule": "zb_v"}),
}
EACH = 2


class Counting(nn.Module):
    """A model with a batch norm, a buffer that it counts in, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # No bias: in front of a batch norm its gradient is rounding, which AdamW takes for a sign.
        self.first, self.norm = nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12)
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.last = nn.Linear(12, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h = torch.tanh(self.norm(self.first(x))) * self.frozen
        return self.last(h).square().mean()


def counting() -> tuple[nn.Module, dict[str, Tensor]]:
    model = Counting().double()
    torch.manual_seed(3)
    return model, {"x": torch.randn(8, 8, dtype=torch.float64)}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)


@functools.cache
def alone(make: Callable[[], Any], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of the unsharded model; the average under "ema.NAME"."""
    model, batch = make()
    optimizer = optimizer_of(model.parameters())
    scheduler, losses = rates(optimizer), []
    means = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if name in means:
                means[name].lerp_(parameter.detach(), 1 - EMA)
    return losses, model.state_dict() | {f"ema.{name}": mean for name, mean in means.items()}


def through(make: Callable[[], Any], names: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of a session that adopts one program after the other."""
    model, batch = make()
    (mesh, options), *others = (PROGRAMS[name] for name in names)
    session = autopar.compile(
        model, mesh, optimizer=optimizer_of, example_inputs=batch, clip_norm=CLIP, ema=EMA,
        **options,
    )  # fmt: skip
    scheduler, losses = rates(session.optimizer), []
    for step in range(EACH * len(names)):
        if step and step % EACH == 0:
            mesh, options = others[step // EACH - 1]
            session.adopt(
                autopar.emit(
                    model, mesh, optimizer=optimizer_of, example_inputs=batch, ema=EMA, **options
                )
            )
            assert session.plan.is_pipeline == ("stages" in options)
        losses.append(session.step(**batch).item())
        scheduler.step()
    found = session.state_dict()
    found |= {f"ema.{name}": value for name, value in session.ema_state_dict().items()}
    session.close()
    return losses, found


def compare(make: Callable[[], Any], names: list[str]) -> None:
    losses, state = alone(make, EACH * len(names))
    for found, values in run_ranks(through, make, names):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=1e-10, atol=1e-12)


def test_data_parallel_then_a_pipeline_then_zero3_train_as_one_run() -> None:
    compare(language, ["data parallel", "pipeline", "zero3"])


@pytest.mark.slow
def test_all_programs_take_over_from_one_another() -> None:
    compare(language, ["interleaved", "megatron", "pipeline", "data parallel", "zero3", "megatron"])


def test_buffers_and_frozen_parameters_go_along() -> None:
    compare(counting, ["data parallel", "free", "zero3"])


def refusals() -> tuple[list[str], list[float]]:
    """What a session says to programs that it cannot adopt, and its losses between them."""
    model, batch = language()
    options: dict[str, Any] = {"example_inputs": batch, "pins": data_parallel("data")}
    session = autopar.compile(model, LINE, optimizer=optimizer_of, clip_norm=CLIP, **options)
    scheduler = rates(session.optimizer)
    other, others_batch = counting()
    own = autopar.emit(model, LINE, **options)
    programs = {
        "another model": autopar.emit(other, LINE, example_inputs=others_batch),
        "another mesh": replace(own, plan=replace(own.plan, mesh=Mesh.parse("cpu: data=2"))),
        "another rank": replace(own, sources=(own.sources[0] + f"\n{dist.get_rank()}",)),
    }
    said, losses = [], []
    for program in programs.values():
        with pytest.raises(AutoparError) as refused:
            session.adopt(program)
        said.append(f"{type(refused.value).__name__}: {refused.value}")
        losses.append(session.step(**batch).item())
        scheduler.step()
    session.close()
    with pytest.raises(ProgramError, match="closed"):
        session.adopt(own)
    return said, losses


def test_what_does_not_fit_is_refused_by_name_and_training_goes_on() -> None:
    losses, _ = alone(language, 3)
    for said, found in run_ranks(refusals):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        model, mesh, rank = said
        assert model.startswith("ProgramError: the compiled program is of another model")
        assert "model.transformer.wte.weight" in model
        assert mesh.startswith("MeshError: mesh 'cpu: data=2' has 2 devices")
        assert rank.startswith("RanksDifferError: the ranks differ in the compiled program")


def failing(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """Losses of a session that fails to start the program that it is to adopt."""
    options: dict[str, Any] = {"example_inputs": batch, "pins": data_parallel("data")}
    session = autopar.compile(model, LINE, optimizer=optimizer_of, clip_norm=CLIP, **options)
    scheduler, losses = rates(session.optimizer), []
    broken = autopar.emit(model, LINE, **options)
    broken = replace(broken, sources=("raise RuntimeError('no such kernel')",))
    for _ in range(2):
        losses.append(session.step(**batch).item())
        scheduler.step()
        with pytest.raises(Exception, match="no such kernel"):
            session.adopt(broken)
    return losses


def test_a_program_that_does_not_start_leaves_the_one_before() -> None:
    losses, _ = alone(language, 2)
    for found in run_ranks(failing, *language()):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)


# Compiled programs in folders ---------------------------------------------------------------------


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


# Adopting against saving and loading --------------------------------------------------------------

Making = Callable[[Any], torch.optim.Optimizer]
# Options of both programs beside their plans, and the optimizer.
FEATURES: dict[str, tuple[dict[str, Any], Making]] = {
    "masters": ({"precision": "bf16"}, optimizer_of),
    "a scaled loss": ({"precision": "fp16"}, optimizer_of),
    "state on the host": ({"precision": "bf16", "offload": "optimizer"}, optimizer_of),
    "groups": ({"groups": autopar.groups({"*.bias": {"weight_decay": 0.0}})}, optimizer_of),
    "momentum": ({}, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "dropout": ({}, optimizer_of),
    "a kernel for the update": ({"fuse": ["adamw"]}, optimizer_of),
}
PAIR = "cpu: data=2 @1TB/s 1ns"
FIRST: dict[str, Any] = {"pins": data_parallel("data"), "state": "zero3"}
SECOND: dict[str, Any] = {"stages": 2, "microbatches": 4}


def both(feature: str, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of a session that adopts a pipeline, and of one that loads the other's checkpoint."""
    options, make = FEATURES[feature]
    double = "precision" not in options
    planning = {name: value for name, value in options.items() if name != "groups"}

    def compiled(**more: Any) -> tuple[autopar.Session, nn.Module, dict[str, Tensor]]:
        model, batch = language(dropout=0.1 if feature == "dropout" else 0.0)
        model = model if double else model.float()
        torch.manual_seed(7)
        session = autopar.compile(
            model, PAIR, optimizer=make, example_inputs=batch, **options, **more
        )
        return session, model, batch

    def steps(session: autopar.Session, batch: dict[str, Tensor]) -> list[float]:
        return [session.step(**batch).item() for _ in range(EACH)]

    session, model, batch = compiled(**FIRST)
    losses = steps(session, batch)
    session.save_checkpoint(folder)
    session.adopt(
        autopar.emit(model, PAIR, optimizer=make, example_inputs=batch, **planning, **SECOND)
    )
    adopted = [*losses, *steps(session, batch)]
    other, _, _ = compiled(**SECOND)
    other.load_checkpoint(folder)
    return adopted, [*losses, *steps(other, batch)]


@pytest.mark.parametrize(
    "feature",
    [
        name if name in ("masters", "dropout") else pytest.param(name, marks=pytest.mark.slow)
        for name in FEATURES
    ],
)
def test_adopting_is_saving_and_loading_to_the_bit(feature: str, tmp_path: Path) -> None:
    for adopted, loaded_again in run_ranks(both, feature, tmp_path / "checkpoint", count=2):
        assert adopted == loaded_again
        assert len(set(adopted)) > EACH  # a step that the scaler leaves out changes nothing

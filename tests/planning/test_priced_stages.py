"""Pipelines under a calibration of the whole mesh: planned, explained and emitted by its prices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.codegen.emit import emit
from autopar.cost.calibration import Calibration, Exchange, Kernel, Product, Timing
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel
from autopar.cost.work import Gemm, Work
from autopar.errors import CalibrationError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.trace import Trace
from autopar.zoo import load
from tests.cli.test_commands import refused, run
from tests.cli.test_why import MODEL as SOURCE

MESH, STAGE = Mesh.parse("cpu: node=2, gpu=2"), Mesh.parse("cpu: node=1, gpu=2")
SEND = 0.7


def slow(mesh: Mesh = MESH) -> Calibration:
    """A machine on which a product takes a hundredth of a second, and a message SEND seconds."""
    sides = ((m, n, k) for m in (8, 64) for n in (8, 64) for k in (8, 64))
    products = tuple(
        Product("f32", Gemm(1, *s, rows=0), Timing(0.01 + 1e-7 * (s[0] * s[1] * s[2]), 0.0))
        for s in sides
    )
    kernels = (Kernel("aten.add.Tensor", "f32", 0.0, 4096.0, Timing(1e-3, 0.0)),)
    times = {("node",): 3e-3, ("gpu",): 2e-3, ("node", "gpu"): 5e-3}
    calls = [
        Exchange(kind, axes, float(n), Timing(seconds * (1 + n / 4096), 0.0))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for axes, seconds in times.items()
        for n in (64, 65536)
    ]
    calls += [Exchange("send", ("node",), float(n), Timing(SEND, 0.0)) for n in (64, 1 << 30)]
    return Calibration(mesh, "2.13.0", "2026-01-31", products, kernels, tuple(calls))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a calibration of the whole mesh, and a plan of two stages made under it."""
    path = tmp_path_factory.mktemp("priced_stages")
    (path / "model.py").write_text(SOURCE)
    (path / "own.toml").write_text(slow().to_toml())
    model, batch = load(f"{path / 'model.py'}:model")
    made = autopar.plan(
        model, str(MESH), example_inputs=batch, stages=2, microbatches=4,
        calibration=path / "own.toml",
    )  # fmt: skip
    assert isinstance(made, Plan)
    made.save(path / "plan.toml")
    return path


def arguments(folder: Path, command: str, *rest: object, own: bool = True) -> list[object]:
    given = ("--calibration", folder / "own.toml") if own else ()
    return [command, folder / "plan.toml", "--model", f"{folder / 'model.py'}:model", *rest, *given]


def test_a_part_has_the_prices_of_its_links_and_scaled_ones_elsewhere() -> None:
    whole, part = MeasuredModel(MESH, slow()), MeasuredModel(STAGE, slow(), MESH)
    product = Work("aten.mm", 2.0 * 8**3, 768.0, "f32", Gemm(1, 8, 8, 8, 0))
    assert part.compute(product) == whole.compute(product)
    inside = Collective("all_gather", ("gpu",), 1000)
    assert part.collective(inside) == whole.collective(inside)
    assert part.measured(inside)
    assert part.collective(Collective("all_gather", ("node",), 1000)) == 0.0
    # Both axes of a part whose nodes are one are gpu alone.
    assert part.collective(replace(inside, axes=("node", "gpu"))) == whole.collective(inside)
    # On four of eight devices nothing was measured over this axis; closed forms keep their ratio.
    many, few = Mesh.parse("cpu: node=2, gpu=8"), Mesh.parse("cpu: node=1, gpu=4")
    half = MeasuredModel(few, slow(many), many)
    assert not half.measured(inside)
    ratio = half.collective(inside) / AnalyticModel(few).collective(inside)
    other = replace(inside, nbytes=50_000)
    assert half.collective(other) / AnalyticModel(few).collective(other) == pytest.approx(ratio)
    assert ratio > 1
    with pytest.raises(CalibrationError, match="another mesh"):
        MeasuredModel(STAGE, slow())


def test_every_stage_records_it_and_the_step_has_its_messages(folder: Path) -> None:
    made = Plan.load(folder / "plan.toml")
    assert {stage.calibration for stage in made.stages} == {slow().fingerprint}
    # The first microbatch goes there and the last one's gradient comes back.
    assert made.predicted.step_seconds > 2 * SEND


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_its_figures_are_those_of_the_plan(folder: Path, command: str) -> None:
    made = Plan.load(folder / "plan.toml")
    own = json.loads(run(*arguments(folder, command, "--json")).stdout)
    assert own["step_seconds"] == pytest.approx(made.predicted.step_seconds, rel=1e-9)
    # A message; what devices gather of it is a part of their forward.
    assert SEND <= own["stages"][1]["arriving"] < SEND + 0.01
    assert all(stage["forward"] > 0.01 for stage in own["stages"])
    closed = run(*arguments(folder, command, "--json", own=False))
    assert f"made with the calibration {slow().fingerprint}; no calibration" in closed.stderr
    assert json.loads(closed.stdout)["step_seconds"] < own["step_seconds"] / 5


def test_one_stage_is_explained_by_it(folder: Path) -> None:
    made = Plan.load(folder / "plan.toml").stages[1]
    told = json.loads(run(*arguments(folder, "explain", "--stage", "1", "--json")).stdout)
    assert sum(told["seconds"].values()) == pytest.approx(made.predicted.step_seconds, rel=0.3)
    closed = run(*arguments(folder, "explain", "--stage", "1", "--json", own=False))
    assert sum(json.loads(closed.stdout)["seconds"].values()) < made.predicted.step_seconds / 5


def test_programs_of_stages_are_those_of_its_prices(folder: Path, tmp_path: Path) -> None:
    run(*arguments(folder, "emit", "-o", tmp_path / "own"))
    made = Plan.load(folder / "plan.toml")
    model, batch = load(f"{folder / 'model.py'}:model")
    captured = capture_call(Call(model, (), batch), Options(), Trace(None), 4)
    graphs = stage_graphs(captured.graph, made.ends, Trace(None))
    for number, (graph, stage) in enumerate(zip(graphs, made.stages, strict=True)):
        prices = MeasuredModel(stage.mesh, slow(), MESH).collective
        wanted = emit(graph, stage, prices)
        written = (tmp_path / "own" / f"stage_{number}.py").read_text()
        assert wanted.partition("def ")[2] in written


def test_a_calibration_of_another_mesh_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stage.toml").write_text(slow(STAGE).to_toml())
    for command in ("explain", "simulate"):
        refused(
            *arguments(folder, command, own=False), "--calibration", tmp_path / "stage.toml",
            says="of another mesh",
        )  # fmt: skip

"""Commands on calibrated plans use the plan's own prices, or report that others are used."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import emit
from autopar.cost.calibration import Calibration, Exchange, Kernel, Product, Timing
from autopar.cost.measured import MeasuredModel
from autopar.cost.work import Gemm
from autopar.explain import difference
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime import folder as folders
from autopar.stage_plan import StagePlan
from autopar.zoo import load
from tests.cli.test_commands import refused, run
from tests.cli.test_why import MODEL as SOURCE

MESH = Mesh.parse("cpu: gpu=2")
PIN = "[64@gpu, 16]"


def slow(factor: float) -> Calibration:
    """A machine on which a product takes hundredths of a second, and collectives `factor` ones."""
    sides = ((m, n, k) for m in (8, 64) for n in (8, 64) for k in (8, 64))
    products = tuple(
        Product("f32", Gemm(1, *s, rows=0), Timing(0.01 + 1e-7 * (s[0] * s[1] * s[2]), 0.0))
        for s in sides
    )
    kernels = (Kernel("aten.add.Tensor", "f32", 0.0, 4096.0, Timing(1e-3, 0.0)),)
    calls = tuple(
        Exchange(kind, ("gpu",), float(n), Timing(factor * (1e-3 + 1e-6 * n), 0.0))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for n in (64, 65536)
    )
    return Calibration(MESH, "2.13.0", "2026-01-31", products, kernels, calls)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two calibrations, and a plan made under the first one."""
    path = tmp_path_factory.mktemp("priced")
    (path / "mlp.py").write_text(SOURCE)
    (path / "own.toml").write_text(slow(1.0).to_toml())
    (path / "other.toml").write_text(slow(3.0).to_toml())
    run(
        "plan", f"{path / 'mlp.py'}:model", "--mesh", MESH, "--calibration", path / "own.toml",
        "-o", path / "plan.toml",
    )  # fmt: skip
    return path


@cache
def graph() -> Graph:
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    module, batch = space["model"]()
    return capture_graph(module, (), batch, Options(), Trace(None)).graph


def planned(folder: Path, pins: dict[str, str] | None = None) -> StagePlan:
    options = Options(pins=pins or {}, calibration=folder / "own.toml")
    return make_plan(graph(), MESH, options, Trace(None))


def arguments(folder: Path, command: str, *rest: object, by: str | None = None) -> list[object]:
    model = ("--model", f"{folder / 'mlp.py'}:model")
    given = () if by is None else ("--calibration", folder / by)
    return [command, folder / "plan.toml", *rest, *model, *given]


def test_a_plan_records_its_calibration(folder: Path) -> None:
    made = Plan.load(folder / "plan.toml")
    assert made.stage.calibration == Calibration.load(folder / "own.toml").fingerprint
    assert made.stage.calibration != slow(3.0).fingerprint
    assert Plan.from_toml(made.to_toml()).stage.calibration == made.stage.calibration
    assert (
        replace(made.stage, calibration="") == made.stage
    )  # who priced it is no part of what it says
    closed = make_plan(graph(), MESH, Options(), Trace(None))
    assert closed.calibration == ""
    assert "calibration" not in str(closed)
    refused(
        *arguments(_edited(folder, "calibration = 7"), "explain"), says="calibration = 7; a text of"
    )


def _edited(folder: Path, line: str) -> Path:
    path = folder / "edited"
    path.mkdir(exist_ok=True)
    text = (folder / "plan.toml").read_text()
    fingerprint = slow(1.0).fingerprint
    (path / "plan.toml").write_text(text.replace(f'calibration = "{fingerprint}"', line))
    (path / "mlp.py").write_text(SOURCE)
    return path


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_its_calibration_gives_its_figures(folder: Path, command: str) -> None:
    own, closed = (
        json.loads(run(*arguments(folder, command, "--json", by=by)).stdout)
        for by in ("own.toml", None)
    )
    if command == "explain":
        own, closed = (sum(found["seconds"].values()) for found in (own, closed))
    else:
        own, closed = (found["step_seconds"] for found in (own, closed))
    step = Plan.load(folder / "plan.toml").predicted.step_seconds
    assert own == pytest.approx(step, rel=1e-9)
    assert closed < step / 10


@pytest.mark.parametrize("command", ["explain", "simulate", "emit"])
def test_other_prices_are_told_by_name(folder: Path, tmp_path: Path, command: str) -> None:
    more = ("-o", tmp_path / "program") if command == "emit" else ("--json",)
    own, other = slow(1.0).fingerprint, slow(3.0).fingerprint
    said = run(*arguments(folder, command, *more)).stderr
    assert f"made with the calibration {own}; no calibration is given" in said
    said = run(*arguments(folder, command, *more, by="other.toml")).stderr
    assert f"the plan was made with {own}" in said
    assert f"is the calibration {other} of 2026-01-31" in said
    assert own not in run(*arguments(folder, command, *more, by="own.toml")).stderr


@pytest.mark.parametrize("rest", [("why", "up.weight"), ("why-not", "up.weight", PIN)])
def test_questions_are_answered_under_its_own_prices_only(
    folder: Path, rest: tuple[str, ...]
) -> None:
    own = slow(1.0).fingerprint
    refused(*arguments(folder, *rest), says=f"made with the calibration {own}")
    refused(*arguments(folder, *rest, by="other.toml"), says=slow(3.0).fingerprint)
    answer = json.loads(run(*arguments(folder, *rest, "--json", by="own.toml")).stdout)
    if rest[0] == "why":
        (answer,) = answer[0]["others"][:1]
        pins = {"up.weight": answer["layouts"]}
    else:
        pins = {"up.weight": PIN}
    figures = {f["name"]: (f["before"], f["after"]) for f in answer["difference"]["figures"]}
    before, after = figures["step_seconds"]
    assert before == pytest.approx(planned(folder).predicted.step_seconds, rel=1e-9)
    assert after == pytest.approx(planned(folder, pins).predicted.step_seconds, rel=1e-9)


def test_the_program_is_the_one_of_its_prices(folder: Path, tmp_path: Path) -> None:
    run(*arguments(folder, "emit", "-o", tmp_path / "own", by="own.toml"))
    run(*arguments(folder, "emit", "-o", tmp_path / "closed"))
    made = Plan.load(folder / "plan.toml")
    prices = MeasuredModel(MESH, slow(1.0)).collective
    source = (tmp_path / "own" / "program.py").read_text()
    model, inputs = load(f"{folder / 'mlp.py'}:model")
    captured = capture_graph(model, (), inputs, Options(), Trace(None)).graph
    assert source == folders.standalone(emit(captured, made.stage, prices))
    assert source != (tmp_path / "closed" / "program.py").read_text()


def test_differences_are_priced_by_it(folder: Path, tmp_path: Path) -> None:
    pinned = tmp_path / "pinned.toml"
    made = planned(folder, {"up.weight": "[64, 16] => [64, 16] -sum(gpu)"})
    other = planned(folder, {"up.weight": PIN})
    assert made.nodes != other.nodes
    Plan.of(other, ModelSpec("mlp.py:model")).save(pinned)
    first = tmp_path / "first.toml"
    Plan.of(made, ModelSpec("mlp.py:model")).save(first)
    command = ("diff", first, pinned, "--model", f"{folder / 'mlp.py'}:model", "--json")
    told = run(*command, "--calibration", folder / "own.toml", code=1)
    prices = MeasuredModel(MESH, slow(1.0)).collective
    found = difference(made, other, (graph(), graph()), (prices, prices))
    assert json.loads(told.stdout)["totals"] == json.loads(json.dumps(asdict(found)))["totals"]
    assert "the plan was made with" not in told.stderr
    assert f"made with the calibration {made.calibration}" in run(*command, code=1).stderr


def test_a_calibration_of_another_mesh_or_device_is_refused(folder: Path, tmp_path: Path) -> None:
    for mesh, says in (("cpu: gpu=4", "of another mesh"), ("H100: gpu=2", "of the device 'H100'")):
        strange = replace(slow(1.0), mesh=Mesh.parse(mesh))
        (tmp_path / "strange.toml").write_text(strange.to_toml())
        given = ("--calibration", tmp_path / "strange.toml")
        refused(*arguments(folder, "explain"), *given, says=says)

"""`autopar calibrate` with tiny settings: its output, and planning with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.cost.calibration import Calibration, Timing
from autopar.cost.measured import MeasuredModel
from autopar.errors import CalibrationError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.compare import QUICK, Effort, compare
from autopar.runtime.communication.measure import Settings, calibrate, groups
from tests.support.models import mlp, squared_error
from tests.support.ranks import run_ranks

PAIR = Mesh.parse("cpu: gpu=2")
TINY = Settings(("f32",), (8, 32), (256, 4096), (8, 16), (256, 4096), 2, 1, 0.0005, ("bf16",))
KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}


def on_ranks(mesh: str, settings: Settings) -> Calibration:
    """Returns what one rank gets."""
    seen: list[int] = []

    def progress(name: str, number: int, total: int) -> None:
        seen.append(number)
        assert name
        assert number <= total

    where = Mesh.parse(mesh), torch.device("cpu")
    made = calibrate(*where, settings, "2026-01-31", progress)
    assert seen == sorted(seen)
    seen.clear()
    compared = compare(*where, Effort(settings.payloads, QUICK), progress)
    assert seen == list(range(1, len(seen) + 1))
    return replace(made, exchanges=(*made.exchanges, *compared))


@pytest.fixture(scope="module")
def pair() -> list[Calibration]:
    return run_ranks(on_ranks, str(PAIR), TINY, count=2)


def test_all_ranks_get_one_calibration_of_every_kind(pair: list[Calibration]) -> None:
    first, second = pair
    assert first == second
    for dtype in ("f32", "bf16"):
        assert [p.dtype for p in first.products].count(dtype) == len(TINY.lengths) ** 3
    assert {kernel.dtype for kernel in first.kernels} == {"f32"}
    assert {call.kind for call in first.exchanges} == KINDS
    plain = [call for call in first.exchanges if not call.by]
    assert len(plain) == len(KINDS) * len(TINY.payloads)
    assert {"optimizer", "aten.gelu", "aten.gelu backward"} <= {k.op for k in first.kernels}
    assert Calibration.from_toml(first.to_toml()) == first
    model = MeasuredModel(PAIR, first)
    for call in plain:
        assert model.measured(Collective(call.kind, call.axes, 1000))


def test_algorithms_are_compared_at_every_size(pair: list[Calibration]) -> None:
    compared = [call for call in pair[0].exchanges if call.by]
    assert {call.kind for call in compared} == {kind for kind in KINDS if "_" in kind}
    model = MeasuredModel(PAIR, pair[0])
    for kind in {call.kind for call in compared}:
        own = {(call.by, call.nbytes) for call in compared if call.kind == kind}
        assert len(own) == len(TINY.payloads) * len({by for by, _ in own})
        assert {"library", *model.compared(kind, ("gpu",))} == {by for by, _ in own}
        # Equal rounds are measured once: two ranks make a ring of one message each.
        names = [by for by in model.compared(kind, ("gpu",)) if "/" not in by]
        assert not {"flat_ring", "2d_torus"} <= {*names}


def test_every_group_of_axes_is_measured() -> None:
    assert groups(Mesh.parse("cpu: a=2, b=1, c=2")) == [("a",), ("c",), ("a", "c")]


def test_plans_are_priced_by_the_calibration(pair: list[Calibration], tmp_path: Path) -> None:
    """Every product takes an hour: the plan takes one an operator and direction."""
    hour = tuple(type(p)(p.dtype, p.gemm, Timing(3600.0, 0.0)) for p in pair[0].products)
    file = tmp_path / "slow.toml"
    made = Calibration(PAIR, pair[0].torch, pair[0].date, hour, pair[0].kernels, pair[0].exchanges)
    file.write_text(made.to_toml(), encoding="utf-8")
    model, batch = mlp((16, 32, 8), 8)
    slow = autopar.plan(
        model, str(PAIR), example_inputs=batch, loss_fn=squared_error, calibration=file
    )
    # Two linears: two products forwards; backwards two of weights and one of an activation.
    assert 5 * 3600 <= slow.predicted.step_seconds < 5 * 3600 + 60
    with pytest.raises(CalibrationError, match="another mesh"):
        autopar.plan(
            model, "cpu: gpu=4", example_inputs=batch, loss_fn=squared_error, calibration=file
        )


def test_the_command_measures_and_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "found.toml"
    run = CliRunner().invoke(main, ["calibrate", "--quick", "--json", "-o", str(file)])
    assert run.exit_code == 0, run.output
    made = Calibration.load(file)
    assert made.mesh.size == 1
    assert not made.exchanges
    rows = json.loads(run.stdout)["points"]
    assert len(rows) == len(made.products) + len(made.kernels)
    assert all(row["seconds"] > 0 and row["closed_form"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "cpu: gpu=2", "--ranks", "3"], "--ranks 3"),
        (["--mesh", "unheard: gpu=2"], "not known"),
        (["-o", "nowhere/at/all.toml"], "no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(arguments: list[str], words: str) -> None:
    run = CliRunner().invoke(main, ["calibrate", *arguments])
    assert run.exit_code == 2
    assert words in run.output


def test_a_calibration_of_another_device_is_refused_when_planning(
    pair: list[Calibration], tmp_path: Path
) -> None:
    """Before a model is read, which may take long: this one is not there."""
    file = tmp_path / "cpu.toml"
    file.write_text(pair[0].to_toml(), encoding="utf-8")
    arguments = [
        "plan",
        f"{tmp_path / 'model.py'}:model",
        "--mesh",
        "H100: gpu=2",
        "--calibration",
        str(file),
    ]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 2
    assert "calibration is of the device 'cpu'" in run.output

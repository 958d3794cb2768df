"""Plans with an eager host wait for as long as a calibration has measured of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cost.calibration import Calibration, Kernel, Timing
from autopar.cost.kernel_tables import Host
from autopar.cost.measured import MeasuredModel
from autopar.cost.measured_host import ROLES, host_kernel, host_of
from autopar.ir.executed.execution import Execution
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.clocks import Bench
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.measure_host import host_figures
from autopar.simulate import settings_on

ONE = Mesh.parse("H100: gpu=1")
SECONDS = {"operator": 7e-6, "autograd": 9e-6, "collective": 3e-5, "optimizer": 5e-5}
FIGURES = tuple(host_kernel(role, Timing(SECONDS[role], 0.1)) for role in ROLES)
ADDED = Kernel("aten.add.Tensor", "f32", 0.0, 4096.0, Timing(5e-6, 0.1))


def calibration(*kernels: Kernel) -> Calibration:
    return Calibration(ONE, torch.__version__, "2026-01-01", kernels=kernels)


def test_measured_figures_replace_those_of_an_eager_host(tmp_path: Path) -> None:
    file = tmp_path / "measured.toml"
    file.write_text(calibration(ADDED, *FIGURES).to_toml(), encoding="utf-8")
    model = MeasuredModel(ONE, Calibration.load(file))
    assert model.issuing == Host(measured="H100", **SECONDS)
    for text, wanted in (
        ("host=eager", model.issuing),
        ("host=modules", Host.of("modules")),
        ("", None),
    ):
        assert settings_on("H100", Execution.read(text), model.issuing).host == wanted


def test_plans_wait_for_the_measured_host(tmp_path: Path) -> None:
    """An eager host that takes a second to issue a kernel is all that a small model waits for."""
    file, slow = tmp_path / "measured.toml", {**SECONDS, "operator": 1.0}
    figures = tuple(host_kernel(role, Timing(slow[role], 0.1)) for role in ROLES)
    file.write_text(calibration(ADDED, *figures).to_toml(), encoding="utf-8")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    made = autopar.plan(
        model,
        ONE,
        example_inputs=(torch.randn(4, 8),),
        loss_fn=lambda output: output.mean(),
        execution="host=eager",
        calibration=file,
    )
    predicted = made.predicted
    assert 3 <= predicted.waiting_seconds <= 100
    assert predicted.seconds == pytest.approx(predicted.step_seconds, rel=0.01)


def test_some_figures_are_none_and_no_figure_is_a_price_of_kernels() -> None:
    assert host_of(FIGURES[:3], "H100") is None
    with_host, without = (MeasuredModel(ONE, calibration(ADDED, *more)) for more in ((FIGURES), ()))
    assert with_host._scales() == without._scales()


@pytest.mark.parametrize("slower", ["operator", "autograd"])
def test_a_host_that_takes_longer_is_measured_so(
    slower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU does the work as it issues it: its figures are those of the calls."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            if slower == "operator":
                time.sleep(1e-4)
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> torch.Tensor:
            if slower == "autograd":
                time.sleep(1e-4)
            return g.clone()

    monkeypatch.setattr(torch, "tanh", Slow.apply)
    group = Communicator(Mesh.parse("cpu: ranks=1")).group(("ranks",))
    bench = Bench(group, torch.device("cpu"), 3, 0.0)
    found = host_of(host_figures(bench, group), "cpu")
    assert found is not None
    assert getattr(found, slower) > 1e-4
    assert all(getattr(found, role) > 0 for role in ROLES)

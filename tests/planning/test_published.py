"""Published models at their real sizes: planned without weights, emitted as short programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.codegen.emit import emit
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.module_loader import load as load_source
from autopar.zoo import load

MESH = Mesh.parse("H100: node=8, gpu=8")


@pytest.mark.parametrize("layers", [2, pytest.param(32, marks=pytest.mark.slow)])
def test_llama_is_a_program_of_less_than_500_lines(layers: int, tmp_path: Path) -> None:
    model, batch = load("llama-3-8b", batch=64, seq=4096, layers=layers)
    options, trace = Options(), Trace(None)
    graph = capture_graph(model, (), batch, options, trace).graph
    plan = make_plan(graph, MESH, options, trace)
    assert plan.predicted.peak_bytes <= device(MESH).memory
    source = emit(graph, plan, AnalyticModel(MESH).collective)
    assert len(source.splitlines()) < 500
    assert f"for i in range({layers}):" in source
    file = tmp_path / "program.py"
    file.write_text(source, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", str(file)]
    run = subprocess.run(ruff, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    parameters = load_source(source, str(file)).parameters()
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert {p.name: p.shape for p in parameters if p.trainable} == shapes

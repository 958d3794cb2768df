"""`autopar prepare`: what it traces, reports and leaves out, and a run after an interrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli import main, prepare
from autopar.cli.common import kept_graphs
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.trace import Trace

MODELS = ("gpt2", "bert-base", "vit-base")


class Zoo:
    """Three models whose graphs are empty; some cannot be traced or are interrupted."""

    def __init__(self) -> None:
        self.traced: list[str] = []
        self.fails: dict[str, BaseException] = {}

    def capture(self, wanted: ModelSpec, options: Options, tracer: Trace) -> Graph:
        def trace() -> Graph:
            if wanted.source in self.fails:
                raise self.fails[wanted.source]
            self.traced.append(wanted.source)
            tracer("capture.txt", str)
            return Graph(wanted.source, (), ())

        return kept_graphs.remembered(wanted, options, trace)


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    zoo = Zoo()
    monkeypatch.setattr(kept_graphs, "BESIDE", tmp_path / "graphs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "installer"))
    monkeypatch.setattr(prepare, "PLANS", ())
    monkeypatch.setattr(prepare, "names", lambda: MODELS)
    monkeypatch.setattr(prepare, "capture_model", zoo.capture)
    monkeypatch.setattr(prepare, "large", lambda search: None)
    monkeypatch.setattr(prepare.compileall, "compile_dir", lambda *_, **__: None)
    return zoo


def prepared(*models: str) -> Result:
    return CliRunner().invoke(main, ["prepare", *models])


def test_every_model_is_reported_with_an_estimate(zoo: Zoo) -> None:
    lines = prepared().stderr.splitlines()
    assert zoo.traced == list(MODELS)
    assert [line.partition(":")[0] for line in lines] == list(MODELS)
    assert "model 1 of 3, at most 0 s left" in lines[0]
    assert lines[2].endswith("model 3 of 3")


def test_a_run_after_an_interrupted_one_traces_what_is_missing(zoo: Zoo) -> None:
    zoo.fails["bert-base"] = KeyboardInterrupt()
    assert prepared().exit_code != 0
    assert zoo.traced == ["gpt2"]
    zoo.fails.clear()
    again = prepared()
    assert again.exit_code == 0
    assert zoo.traced == list(MODELS)  # none of them twice
    assert "gpt2: kept before; model 1 of 3\n" in again.stderr


def test_what_cannot_be_traced_is_left_out_unless_it_is_named(zoo: Zoo) -> None:
    zoo.fails["bert-base"] = CaptureError("a branch depends on values")
    whole = prepared()
    assert whole.exit_code == 0
    assert "bert-base is left out: a branch depends on values" in whole.stderr
    assert zoo.traced == ["gpt2", "vit-base"]
    assert prepared("vit-base", "bert-base").exit_code != 0
    assert prepared("gtp2").exit_code != 0

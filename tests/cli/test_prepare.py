"""`autopar prepare`: what it traces, reports and leaves out, and a run after an interrupted one."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from numba.core.dispatcher import Dispatcher

import autopar
from autopar.cli import main, prepare
from autopar.cli.common import kept_graphs
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support.ranks import run_ranks

MODELS = ("gpt2", "bert-base", "vit-base")


class Zoo:
    """Three models whose graphs are empty; some cannot be traced or are interrupted.

    Each is traced in two seconds of a clock of the zoo's own.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.traced: list[str] = []
        self.fails: dict[str, BaseException] = {}

    def capture(self, wanted: ModelSpec, options: Options, tracer: Trace) -> Graph:
        def trace() -> Graph:
            if wanted.source in self.fails:
                raise self.fails[wanted.source]
            self.seconds += 2
            self.traced.append(wanted.source)
            tracer("capture.txt", str)
            return Graph(wanted.source, (), ())

        return kept_graphs.remembered(wanted, options, trace)


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    zoo = Zoo()
    monkeypatch.setattr(kept_graphs, "BESIDE", tmp_path / "graphs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "installer"))
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: zoo.seconds))
    monkeypatch.setattr(prepare, "names", lambda: MODELS)
    monkeypatch.setattr(prepare, "capture_model", zoo.capture)
    monkeypatch.setattr(prepare, "compile_loops", lambda stage: None)
    monkeypatch.setattr(prepare.compileall, "compile_dir", lambda *_, **__: None)
    return zoo


def prepared(*models: str) -> Result:
    return CliRunner().invoke(main, ["prepare", *models])


def test_every_model_is_reported_with_an_estimate(zoo: Zoo) -> None:
    lines = prepared().stderr.splitlines()
    assert zoo.traced == list(MODELS)
    assert [line.partition(":")[0] for line in lines] == list(MODELS)
    assert lines[0] == "gpt2: traced in 2 s; model 1 of 3, at most 4 s left"
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


def loops_that_were_not_run() -> list[str]:
    """Prepares the loops; returns those that have no code yet, by module and name."""
    prepare.compile_loops(lambda _: None)
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(autopar.__path__, "autopar.")
        if not module.name.endswith("__main__")
    ]
    loops = {
        f"{value.__module__}.{value.__name__}": value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Dispatcher) and "no_cpython_wrapper" not in value.targetoptions
    }
    assert len(loops) > 20
    return sorted(name for name, loop in loops.items() if not loop.signatures)


@pytest.mark.slow
def test_every_loop_is_compiled() -> None:
    assert run_ranks(loops_that_were_not_run, count=1) == [[]]

"""`autopar report`: the page by an HTML parser, and the charts by their data."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autopar.cli import main
from autopar.cost.device import device
from autopar.explain.report import charts
from autopar.explain.report.page import Part, page
from autopar.ir.mesh import Mesh
from autopar.plan import Plan

MESH = "H100: gpu=4"
SMALL = ("--batch", 8, "--seq", 32, "--layers", 2)


class Reader(HTMLParser):
    """Reads tags, texts of sections, scripts and cells."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.texts).append(data)

    @property
    def charts(self) -> dict[str, list[dict[str, Any]]]:
        """The traces of every chart by its name."""
        found = {}
        for script in self.scripts:
            _, called, rest = script.partition("Plotly.newPlot(")
            if called and len(script) < 10**6:
                name, place = json.JSONDecoder().raw_decode(rest.lstrip())
                rest = rest.lstrip()[place:].lstrip(", \n")
                found[name.removeprefix("chart-")] = json.JSONDecoder().raw_decode(rest)[0]
        return found


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@cache
def plans(folder: Path) -> tuple[Path, Path]:
    first, second = folder / "a.toml", folder / "b.toml"
    run("plan", "gpt2", "--mesh", MESH, *SMALL, "-o", first)
    run("plan", "gpt2", "--mesh", MESH, *SMALL, "--pins", "data_parallel:gpu", "-o", second)
    return first, second


def test_a_page_shows_a_plan(tmp_path: Path) -> None:
    first, second = plans(tmp_path)
    out = tmp_path / "plan.html"
    run("report", first, "--against", second, "-o", out)
    read, text = Reader(out.read_text()), out.read_text()
    ids = [attrs["id"] for _, attrs in read.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for tag, attrs in read.tags if tag == "a"]
    assert links
    assert {str(link).removeprefix("#") for link in links} < set(ids)
    assert not [tag for tag, attrs in read.tags if "src" in attrs or tag in ("link", "img")]
    assert set(read.charts) == {
        "parameters", "time", "memory", "curve", "roofline", "frontier", "difference"
    }  # fmt: skip
    plan, other = Plan.load(first), Plan.load(second)
    explained = json.loads(run("explain", first, "--json").stdout)
    layers(read.charts, explained)
    (curve,) = read.charts["curve"]
    assert max(curve["y"]) * 2**30 == pytest.approx(plan.predicted.peak_bytes, rel=1e-6)
    assert curve["x"] == sorted(curve["x"])
    below_the_roof(read.charts["roofline"])
    falls_with_memory(read.charts["frontier"], plan.predicted.step_seconds)
    both = {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in
            read.charts["difference"]}  # fmt: skip
    assert both["this plan"]["step"] == 1000 * plan.predicted.step_seconds
    assert both["the other"]["step"] == 1000 * other.predicted.step_seconds
    assert "transformer.wte.weight" in text[text.index('id="why"') :]


def layers(found: dict[str, list[dict[str, Any]]], explained: dict[str, Any]) -> None:
    """Bars of layers add up to the explanation; cells are the parts of its parameters."""
    for trace in found["time"]:
        assert sum(trace["x"]) == pytest.approx(1000 * explained["seconds"][trace["name"]])
    for trace in found["memory"]:
        assert sum(trace["x"]) * 2**30 == pytest.approx(explained["memory"][trace["name"]])
    (heat,) = found["parameters"]
    assert heat["x"] == ["stored gpu", "state gpu", "used gpu"]
    cells = dict(zip(heat["y"], heat["z"], strict=True))
    for parameter in explained["parameters"]:
        split = ["gpu" in parameter[kind] for kind in ("axes", "updated_axes", "used_axes")]
        assert cells[parameter["name"]] == [2.0 if each else 0.0 for each in split]


def falls_with_memory(traces: list[dict[str, Any]], fastest: float) -> None:
    (trace,) = traces
    assert trace["y"] == sorted(trace["y"])
    assert trace["x"] == sorted(trace["x"], reverse=True)
    assert trace["y"][0] <= 1000 * fastest * (1 + 1e-6)


def below_the_roof(traces: list[dict[str, Any]]) -> None:
    chip = device(Mesh.parse(MESH))
    roof, points = traces
    assert len(points["x"]) > 10
    for flops_by_byte, rate in zip(points["x"], points["y"], strict=True):
        assert rate <= min(chip.rate("f32", True), chip.memory_bandwidth * flops_by_byte) * 1.001
    assert max(roof["y"]) == chip.rate("f32", True)


def test_a_pipeline_has_its_schedule(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "plan.html"
    stages = ("--stages", 2, "--microbatches", 4)
    run("plan", "gpt2", "--mesh", "H100: pp=2, gpu=2", *SMALL, *stages, "-o", plan)
    run("report", plan, "-o", out)
    found = Reader(out.read_text()).charts
    assert set(found) == {
        "parameters", "time", "memory", "schedule", "curve", "roofline", "frontier",
    }  # fmt: skip
    below_the_roof(found["roofline"])
    assert {name.partition(": ")[0] for name in found["roofline"][1]["text"]} == {"0", "1"}
    falls_with_memory(found["frontier"], Plan.load(plan).predicted.step_seconds)
    assert "Why not otherwise" in out.read_text()
    counts = Counter[str]()
    spans: dict[str, list[tuple[float, float]]] = {}
    for trace in found["schedule"]:
        for row, start, length in zip(trace["y"], trace["base"], trace["x"], strict=True):
            counts[trace["name"]] += 1
            spans.setdefault(row, []).append((start, start + length))
    assert counts["F"] == counts["B"] == 8
    assert set(spans) == {"ranks 0-1", "ranks 2-3"}
    for own in map(sorted, spans.values()):
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(own))
    end = max(end for own in spans.values() for _, end in own)
    assert end == pytest.approx(1000 * Plan.load(plan).predicted.step_seconds, rel=1e-6)
    (heat,) = found["parameters"]
    assert {name.partition(": ")[0] for name in heat["y"]} == {"0", "1"}


def test_equal_stages_share_a_row_and_small_layers_a_bar() -> None:
    def stage(axes: tuple[str, ...]) -> Any:
        weight = SimpleNamespace(
            name="w", stored="[4]", used="[4]", axes=axes, updated_axes=(), used_axes=()
        )
        return SimpleNamespace(parameters=(weight,))

    stages = {f"{n}: ": stage(("gpu",) if n == 3 else ()) for n in range(6)}
    mesh = dict.fromkeys(stages, Mesh.parse(MESH))
    (trace,) = charts.heat_map(stages, mesh).data
    assert list(trace.y) == ["0-2, 4-5: w", "3: w"]
    assert [list(row) for row in trace.text] == [["", "", ""], ["4", "", ""]]
    causes = {"compute": {"a": 9.0, "b": 1e-3, "c": 1e-3}, "activations": {"a": 1.0, "b": 1e-3}}
    assert charts._merged(causes) == ["a", "2 smaller rows"]
    assert causes["compute"] == {"a": 9.0, "2 smaller rows": 2e-3}
    assert causes["activations"] == {"a": 1.0, "2 smaller rows": 1e-3}


def test_names_from_outside_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<script>alert(1)</script>"
    bars = [charts.Bar(evil, evil, evil, 0.0, 1.0)]
    kernels = [charts.Kernel(evil, 1.0, 1.0, 1.0)]
    parts = [
        Part("a", evil, evil, charts.gantt(bars), [[evil], [evil]]),
        Part("b", evil, evil, charts.roofline(kernels, 2.0, 1.0)),
    ]
    text = page(evil, [(evil, evil)], parts)
    read = Reader(text)
    assert "alert" not in "".join(read.scripts).replace("\\u003c", "").partition("newPlot")[0]
    assert [tag for tag, _ in read.tags].count("script") == 1 + 2
    assert read.charts["a"][0]["text"] == ["&lt;script&gt;alert(1)&lt;/script&gt;"]


def test_plotly_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    first, _ = plans(tmp_path)
    output = run("report", first, "--quick", "-o", tmp_path / "plan.html", code=2).output
    assert "pip install autopar[report]" in output
    assert not (tmp_path / "plan.html").exists()

"""`autopar diff`: its figures, layouts and collectives are those of the plans; its exit status."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.cost.model import AnalyticModel
from autopar.explain import moves
from autopar.ir.graph import Graph
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.cli.test_commands import LLAMA, MESH, refused, run

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, x):
        return self.blocks(x).square().sum()

def model(batch=16, layers=3):
    return Stack(layers), {"x": torch.zeros(batch, 32)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of a stack of blocks: the best, one of ZeRO-3, others by mesh and by model."""
    path = tmp_path_factory.mktemp("plans")
    (path / "stack.py").write_text(MODEL)
    model = f"{path / 'stack.py'}:model"
    run("plan", model, "--mesh", MESH, "-o", path / "a.toml")
    run("plan", model, "--mesh", MESH, "--pins", "fsdp", "-o", path / "b.toml")
    run("plan", model, "--mesh", "H100: gpu=2", "-o", path / "c.toml")
    run("plan", model, "--mesh", MESH, "--layers", 4, "--batch", 8, "-o", path / "d.toml")
    return path


@pytest.fixture
def differ(folder: Path) -> Callable[..., Any]:
    """What the command prints as JSON for two plans that differ."""

    def differ(first: str, second: str, *arguments: object) -> Any:
        named = ("--model", f"{folder / 'stack.py'}:model", *arguments)
        paths = (folder / first, folder / second)
        return json.loads(run("diff", *paths, *named, "--json", code=1).stdout)

    return differ


@cache
def captured(**sizes: int) -> Graph:
    """The same model, captured by itself."""
    space: dict[str, Any] = {}
    exec(MODEL, space)
    module, batch = space["model"](**sizes)
    return capture_graph(module, (), batch, Options(), Trace(None)).graph


def sent(path: Path, **sizes: int) -> Counter[tuple[str, str]]:
    """Bytes that a device sends in a step, by kind and axes."""
    plan, found = Plan.load(path), Counter[tuple[str, str]]()
    for move in moves(captured(**sizes), plan.stage, AnalyticModel(plan.mesh).collective):
        for call in move.calls:
            found[call.kind, ", ".join(call.axes)] += move.times * call.nbytes
    return found


def test_a_plan_does_not_differ_from_itself(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.toml"
    text = (folder / "a.toml").read_text()
    copy.write_text(f"# another comment\n{text}")
    assert run("diff", folder / "a.toml", copy).output == ""
    found = json.loads(run("diff", folder / "a.toml", copy, "--json").stdout)
    assert found["equal"]
    assert not any(found[name] for name in ("head", "pins", "changes", "traffic"))
    assert all(figure["before"] == figure["after"] for figure in found["figures"])
    # The order of the axes that are owed a sum means nothing.
    assert "-sum(node, gpu)" in text
    copy.write_text(text.replace("-sum(node, gpu)", "-sum(gpu, node)"))
    assert run("diff", folder / "a.toml", copy).output == ""


def test_figures_layouts_and_collectives_are_those_of_the_plans(
    folder: Path, differ: Callable[..., Any]
) -> None:
    found = differ("a.toml", "b.toml")
    a, b = Plan.load(folder / "a.toml"), Plan.load(folder / "b.toml")
    assert not found["equal"]
    assert found["note"] == ""
    assert found["head"] == {}
    assert found["pins"] == {name: ["", text] for name, text in b.stage.pins.items()}
    figures = {figure["name"]: (figure["before"], figure["after"]) for figure in found["figures"]}
    assert figures == {
        name: (getattr(a.predicted, name), getattr(b.predicted, name))
        for name in a.predicted.figures()
    }
    nodes = {node for change in found["changes"] for node in change["nodes"]}
    expected = {
        name for name, entry in a.stage.nodes.items() if str(entry) != str(b.stage.nodes[name])
    }
    # A parameter's line belongs to its share's.
    assert nodes == expected - {leaf.name for leaf in captured().leaves("param")}
    times = {change["name"]: change["times"] for change in found["changes"]}
    # The first block's input has no gradient, so the other two are one.
    inside = [name for name in times if name.startswith("blocks.*")]
    assert inside
    assert all(times[name] == 2 for name in inside)
    assert not any(name.startswith(("blocks.1", "blocks.2")) for name in times)
    before, after = sent(folder / "a.toml"), sent(folder / "b.toml")
    totals = {(t["kind"], t["axes"]): (t["before"][1], t["after"][1]) for t in found["totals"]}
    assert totals == {place: (before[place], after[place]) for place in before | after}
    change = sum(t["after"][1] - t["before"][1] for t in found["traffic"])
    assert change == after.total() - before.total()
    assert all(t["before"] != t["after"] for t in found["traffic"])


def test_the_other_way_round_it_is_the_opposite(differ: Callable[..., Any]) -> None:
    there, back = differ("a.toml", "b.toml"), differ("b.toml", "a.toml")
    for name in ("figures", "changes", "totals", "traffic"):
        swapped = [{**e, "before": e["after"], "after": e["before"]} for e in back[name]]
        assert sorted(map(str, swapped)) == sorted(map(str, there[name]))


def test_plans_for_other_meshes_are_compared(folder: Path, differ: Callable[..., Any]) -> None:
    found = differ("a.toml", "c.toml")
    assert found["head"] == {"mesh": [MESH, "H100: gpu=2"]}
    before, after = sent(folder / "a.toml"), sent(folder / "c.toml")
    axes = {axes for _, axes in before | after}
    assert {total["axes"] for total in found["totals"]} == axes
    assert any("node" in name for name in axes)
    assert sum(total["after"][1] for total in found["totals"]) == after.total()


def test_plans_for_other_models_are_compared(folder: Path, differ: Callable[..., Any]) -> None:
    found = differ("a.toml", "d.toml")
    assert set(found["head"]) == {"graph", "model"}
    assert "layers 4" in found["head"]["model"][1]
    after = sent(folder / "d.toml", batch=8, layers=4)
    assert sum(total["after"][1] for total in found["totals"]) == after.total()


def test_layouts_alone_need_no_model(folder: Path, differ: Callable[..., Any]) -> None:
    found = differ("a.toml", "b.toml", "--layouts")
    assert found["totals"] is None
    assert found["traffic"] is None
    a, b = Plan.load(folder / "a.toml"), Plan.load(folder / "b.toml")
    expected = {
        name for name, entry in a.stage.nodes.items() if str(entry) != str(b.stage.nodes[name])
    }
    assert {node for change in found["changes"] for node in change["nodes"]} == expected


def test_the_text_names_what_differs(folder: Path, differ: Callable[..., Any]) -> None:
    found = differ("a.toml", "b.toml")
    arguments = (folder / "a.toml", folder / "b.toml", "--model", f"{folder / 'stack.py'}:model")
    shown = run("diff", *arguments, "--all", code=1).stdout
    flat = " ".join(shown.split())
    for change in found["changes"]:
        assert change["name"] in flat
    for total in found["totals"]:
        assert total["before"] == total["after"] or f"{total['kind']} {total['axes']}" in flat
    short = run("diff", *arguments, code=1).stdout
    assert "more; --all shows them" in short
    assert len(short) < len(shown)


@pytest.mark.parametrize("spelled", ["{}:run", "{}", "./{}:run"])
def test_a_plan_that_names_code_runs_nothing(
    spelled: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\ndef run(**flags): open('ran', 'w')\n")
    for name in ("a.toml", "b.toml"):
        text = (folder / name).read_text()
        source = f"{folder / 'stack.py'}:model"
        assert source in text
        (tmp_path / name).write_text(text.replace(source, spelled.format("evil.py")))
    result = run("diff", "a.toml", "b.toml", code=1)
    assert "collectives are not compared" in result.stderr
    assert "evil.py" in result.stderr
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_another_now_leaves_the_layouts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stack.py").write_text(MODEL.replace("64", "128"))
    model = ("--model", f"{tmp_path / 'stack.py'}:model")
    result = run("diff", folder / "a.toml", folder / "b.toml", *model, code=1)
    assert "collectives are not compared" in result.stderr
    assert Plan.load(folder / "a.toml").graph in result.stderr


@pytest.mark.slow
def test_a_model_that_is_data_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = (f"hf:{tmp_path / 'config.json'}", "--seq", 16, "--mesh", MESH)
    run("plan", *arguments, "-o", tmp_path / "a.toml")
    run("plan", *arguments, "--pins", "fsdp", "-o", tmp_path / "b.toml")
    result = run("diff", tmp_path / "a.toml", tmp_path / "b.toml", "--json", code=1)
    found = json.loads(result.stdout)
    assert found["note"] == ""
    assert found["totals"]
    assert "model.layers.*.mlp.up_proj.weight" in {c["name"] for c in found["changes"]}


def test_bad_files_are_named(folder: Path, tmp_path: Path) -> None:
    good, bad = folder / "a.toml", tmp_path / "bad.toml"
    refused("diff", good, bad, says="cannot read the plan")
    bad.write_text(good.read_text().replace("version = 2", "version = 7"))
    refused("diff", good, bad, says="the plan has version 7")
    refused("diff", bad, good, says=str(bad))


def test_plans_that_differ_by_less_than_prices_are_off_count_as_equally_fast(
    folder: Path, tmp_path: Path
) -> None:
    """A plan's step is edited: by less than the error of what is computed, or by more."""
    plan = Plan.load(folder / "a.toml")
    for part, said in ((0.999, True), (0.2, False)):
        stage = plan.stage
        computed = stage.predicted.compute_seconds
        # All computing is other computing, the step a little or much shorter.
        step = stage.predicted.step_seconds * part
        predicted = replace(stage.predicted, step_seconds=step, compute_seconds=computed / 2)
        other = tmp_path / f"{part}.toml"
        Plan.of(replace(stage, predicted=predicted)).save(other)
        found = run("diff", folder / "a.toml", other, "--layouts", code=1)
        assert ("take them for equally fast" in found.stderr) == said

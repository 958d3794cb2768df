"""`autopar why` and `why-not` agree with plans that are made independently."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.intra_op.node_choices import parameter_options
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.cli.test_commands import refused, run

SLOW = pytest.mark.slow
# Links so slow that layouts differ by much more than the gap at which a search ends.
MESH = "toy[1TFLOP/s 1GB 100GB/s]: node=2 @100MB/s 1us, gpu=2 @300MB/s 1us"
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        hidden = F.relu(self.up(x))
        return (self.down(hidden) + x).square().sum()

def model(batch=32):
    return Perceptron(), {"x": torch.zeros(batch, 16)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and the best plan of it."""
    path = tmp_path_factory.mktemp("perceptron")
    (path / "mlp.py").write_text(MODEL)
    run("plan", f"{path / 'mlp.py'}:model", "--mesh", MESH, "-o", path / "plan.toml")
    return path


@pytest.fixture
def ask(folder: Path) -> Callable[..., Any]:
    """Runs a command on the plan; what it prints as JSON."""

    def ask(command: str, *arguments: object, plan: str = "plan.toml") -> Any:
        model = ("--model", f"{folder / 'mlp.py'}:model")
        return json.loads(run(command, folder / plan, *arguments, *model, "--json").stdout)

    return ask


@cache
def graph() -> Graph:
    """The same model, captured by itself."""
    space: dict[str, Any] = {}
    exec(MODEL, space)
    module, batch = space["model"]()
    return capture_graph(module, (), batch, Options(), Trace(None)).graph


@cache
def planned(name: str = "", layout: str = "", memory: float | None = None) -> StagePlan:
    """The best plan under one pin, made without the command line."""
    pins = {name: layout} if name else {}
    options = Options(pins=pins, memory=memory)
    return make_plan(graph(), Mesh.parse(MESH), options, Trace(None))


def changed(figures: list[dict[str, Any]]) -> dict[str, float]:
    return {figure["name"]: figure["after"] - figure["before"] for figure in figures}


def shown(plan: StagePlan) -> dict[str, float]:
    """The figures that a comparison with another plan of the model shows."""
    return plan.predicted.figures()


def differing(plan: StagePlan, other: StagePlan) -> set[str]:
    return {name for name, entry in plan.nodes.items() if str(entry) != str(other.nodes[name])}


@pytest.mark.parametrize("name", ["up.weight", pytest.param("down.weight", marks=SLOW)])
def test_runners_up_are_those_of_trying_every_layout(ask: Callable[..., Any], name: str) -> None:
    (answer,) = ask("why", name, "-n", 4)
    tensor = next(leaf for leaf in graph().leaves("param") if leaf.target == name).type
    # A pin without -sum(...) leaves open what the gradient owes.
    options = parameter_options(tensor, Mesh.parse(MESH), grad=True)
    shape = tensor.shape
    # Nor what becomes of the gradient and the optimizer state.
    layouts = {
        f"{Layout(o.operands[0].dims).format(shape)} => {Layout(o.results[0].dims).format(shape)}"
        for o in options
    }
    assert len(layouts) > 10
    step = {text: planned(name, text).predicted.step_seconds for text in layouts}
    chosen = answer["layout"].partition(" -sum(")[0]
    assert step[chosen] == pytest.approx(min(step.values()), rel=1e-9)
    best = sorted(seconds for text, seconds in step.items() if text != chosen)
    found = [other["layouts"].partition(" -sum(")[0] for other in answer["others"]]
    assert len({*found, chosen}) == 5
    assert [step[text] for text in found] == pytest.approx(best[:4], rel=1e-6)
    assert best[3] > min(step.values()) * (1 + 1e-6)
    for text, other in zip(found, answer["others"], strict=True):
        after = {f["name"]: f["after"] for f in other["difference"]["figures"]}
        assert after["step_seconds"] == pytest.approx(step[text], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("up.weight", "[64, 16] => [64, 16]"),
        ("down.weight", "[16@node@gpu, 64]"),
        ("up.bias", "[64@gpu]"),
        ("%relu", "[32@gpu, 64@node]"),
    ],
)
def test_the_difference_is_that_of_two_independent_plans(
    ask: Callable[..., Any], name: str, layout: str
) -> None:
    answer = ask("why-not", name, layout)
    plan, other = planned(), planned(name, layout)
    assert answer["fits"]
    found = changed(answer["difference"]["figures"])
    assert set(found) == set(plan.predicted.figures())
    for figure, change in found.items():
        expected = getattr(other.predicted, figure) - getattr(plan.predicted, figure)
        assert change == pytest.approx(
            expected, rel=1e-9, abs=1e-9 * getattr(plan.predicted, figure)
        )
    assert found["step_seconds"] >= -1e-9 * plan.predicted.step_seconds
    changes = answer["difference"]["changes"]
    others = {node for change in changes for node in change["nodes"]}
    own = {decision["node"] for decision in answer["decisions"]}
    assert own.isdisjoint(others)
    leaves = {leaf.name for leaf in graph().leaves("param")}
    assert others == differing(plan, other) - leaves - own


def test_a_line_of_the_source_means_what_it_computes(ask: Callable[..., Any]) -> None:
    line = 1 + MODEL.splitlines().index("        hidden = F.relu(self.up(x))")
    found = ask("why", f"mlp.py:{line}", "-n", 1)
    assert [decision["op"] for decision in found] == ["linear", "relu"]
    assert {decision["place"] for decision in found} == {f"mlp.py:{line}"}
    for decision in found:
        (other,) = decision["others"]
        assert other["layouts"] != decision["layout"]
        assert changed(other["difference"]["figures"])["step_seconds"] >= 0


def test_why_not_takes_a_line_if_it_has_one_such_value(
    ask: Callable[..., Any], folder: Path
) -> None:
    lines = MODEL.splitlines()
    both = 1 + lines.index("        hidden = F.relu(self.up(x))")
    one = 1 + lines.index("        return (self.down(hidden) + x).square().sum()")
    model = ("--model", f"{folder / 'mlp.py'}:model")
    plan = folder / "plan.toml"
    says = f"mlp.py:{both} has 2 values of shape [32, 64]"
    assert "%relu" in refused("why-not", plan, f"mlp.py:{both}", "[32@gpu, 64]", *model, says=says)
    says = "has no values of shape [5]"
    refused("why-not", plan, f"mlp.py:{one}", "[5]", *model, says=says)
    found = ask("why-not", f"src/mlp.py:{one}", "[] +sum(node)")
    assert found["layouts"] == "[] +sum(node)"
    other = planned("%" + found["decisions"][0]["node"], "[] +sum(node)")
    change = other.predicted.step_seconds - planned().predicted.step_seconds
    assert changed(found["difference"]["figures"])["step_seconds"] == pytest.approx(
        change, abs=1e-12
    )


def test_what_has_no_choice_says_why(ask: Callable[..., Any]) -> None:
    (answer,) = ask("why", "x")
    (other,) = answer["others"]
    assert other["difference"] is None
    assert "a batch is given whole" in other["missing"]


def test_the_plan_is_made_again_under_its_own_pins(ask: Callable[..., Any], folder: Path) -> None:
    model = f"{folder / 'mlp.py'}:model"
    pin, path = "[64@node, 16]", folder / "pinned.toml"
    run("plan", model, "--mesh", MESH, "--pin", f"up.weight={pin}", "-o", path)
    (fixed,) = ask("why", "up.weight", "-n", 1, plan="pinned.toml")
    # How it is stored is left open by the pin; nothing else is.
    assert fixed["others"][0]["layouts"].partition("=> ")[2].startswith(pin)
    (last,) = ask("why", "up.weight", "-n", 8, plan="pinned.toml")[0]["others"][-1:]
    assert f"'up.weight' = '{pin}'" in last["missing"]
    says = "contradict each other"
    arguments = (path, "up.weight", "[64@gpu, 16]", "--model", model)
    assert pin in refused("why-not", *arguments, says=says)
    answer = ask("why-not", "down.weight", "[16, 64@gpu]", plan="pinned.toml")
    options = Options(pins={"up.weight": pin, "down.weight": "[16, 64@gpu]"})
    other = make_plan(graph(), Mesh.parse(MESH), options, Trace(None))
    after = {figure["name"]: figure["after"] for figure in answer["difference"]["figures"]}
    assert after == pytest.approx(shown(other), rel=1e-9)


def test_what_does_not_fit_says_by_how_much(ask: Callable[..., Any]) -> None:
    best = planned().predicted.peak_bytes
    layout = "[64, 16] => [64, 16]"
    limit = int(too_little(layout))
    assert limit > best / 4
    answer = ask("why-not", "up.weight", layout, "--memory", f"{limit}B")
    assert not answer["fits"]
    peak = planned("up.weight", layout, float("inf")).predicted.peak_bytes
    assert answer["excess"] == peak - limit
    assert "fit" in answer["missing"]
    enough = ask("why-not", "up.weight", layout, "--memory", f"{int(max(peak, best))}B")
    assert enough["fits"]
    assert enough["excess"] == 0


@cache
def too_little(layout: str) -> float:
    """Memory that no plan with that layout fits into, but some into a little more: by bisection."""
    low, high = 0.0, planned("up.weight", layout, float("inf")).predicted.peak_bytes
    while high - low > 1024:
        middle = (low + high) / 2
        try:
            high = planned("up.weight", layout, middle).predicted.peak_bytes
        except InfeasibleError:
            low = middle
    return low


def test_an_edited_plan_is_priced_anew(ask: Callable[..., Any], folder: Path) -> None:
    text = (folder / "plan.toml").read_text()
    step = planned().predicted.step_seconds
    assert str(step) in text
    (folder / "edited.toml").write_text(text.replace(str(step), str(7 * step)))
    first, second = (
        ask("why-not", "up.bias", "[64@gpu]", plan=plan) for plan in ("plan.toml", "edited.toml")
    )
    old, new = (
        {f["name"]: (f["before"], f["after"]) for f in answer["difference"]["figures"]}
        for answer in (first, second)
    )
    assert all(old.pop("simulated_seconds"))
    assert new.pop("simulated_seconds") == (0, 0)  # the edited plan was not simulated
    assert {name: figure[0] for name, figure in new.items()} == pytest.approx(
        {name: figure[0] for name, figure in old.items()}, rel=1e-12
    )


def test_the_text_says_what_the_json_says(ask: Callable[..., Any], folder: Path) -> None:
    model = ("--model", f"{folder / 'mlp.py'}:model")
    (answer,) = ask("why", "up.weight")
    shown = run("why", folder / "plan.toml", "up.weight", *model).stdout
    flat = " ".join(shown.split())
    for layout in (answer["layout"], *(other["layouts"] for other in answer["others"])):
        assert layout in flat
    for change in answer["others"][0]["difference"]["changes"]:
        assert change["after"] in flat
    assert "solved in" in shown
    shown = run("why-not", folder / "plan.toml", "up.weight", "[64@gpu, 16]", *model).stdout
    assert "instead  [64@gpu, 16] => [64@gpu, 16]" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("why", "up.wieght"), "did you mean up.weight"),
        (("why", "mlp.py:1"), "is named"),
        (("why-not", "down.bias", "[16]"), "is named"),
        (("why-not", "up.weight", "[64, 15]"), "its shape is [64, 16]"),
        (("why-not", "up.weight", "[64@rack, 16]"), "'rack' is no axis of toy"),
        (("why-not", "up.weight", "64 x 16"), "cannot read"),
        (("why-not", "x", "[32@gpu, 16]"), "a batch is given whole"),
        (("why", "up.weight", "--memory", "lots"), "cannot read the quantity"),
    ],
)
def test_bad_questions_are_named(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    command, *rest = arguments
    model = ("--model", f"{folder / 'mlp.py'}:model")
    refused(command, folder / "plan.toml", *rest, *model, says=says)


def test_bad_plans_are_named(folder: Path, tmp_path: Path) -> None:
    text, model = (folder / "plan.toml").read_text(), f"{folder / 'mlp.py'}:model"
    for command, *rest in (("why", "up.weight"), ("why-not", "up.weight", "[64, 16]")):
        next_step = "autopar plan MODEL --mesh MESH -o FILE"
        absent = refused(command, tmp_path / "none.toml", *rest, says="cannot read the plan")
        (tmp_path / "damaged.toml").write_text(text.replace("[stages.layouts]", "[lay"))
        damaged = refused(command, tmp_path / "damaged.toml", *rest, says="not readable TOML")
        (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
        binary = refused(command, tmp_path / "binary.toml", *rest, says="it is no text")
        assert all(next_step in said for said in (absent, damaged, binary))
        refused(command, folder / "plan.toml", *rest, says="code that a plan names is not run")
        arguments = (folder / "plan.toml", *rest, "--model", model, "--batch", 64)
        assert "give the batch" in refused(command, *arguments, says="or another batch")


def test_a_name_of_too_many_choices_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.cli.why.MOST", 2)
    model = ("--model", f"{folder / 'mlp.py'}:model")
    says = "'*.*' names 3 decisions, more than the 2"
    assert "%up_weight" in refused("why", folder / "plan.toml", "*.*", *model, says=says)


@pytest.fixture(scope="module")
def tight(folder: Path) -> int:
    """A limit in bytes under which the best plan is another one, and tight.toml of that plan."""
    limit = int(0.6 * planned().predicted.peak_bytes)
    model = f"{folder / 'mlp.py'}:model"
    run("plan", model, "--mesh", MESH, "--memory", f"{limit}B", "-o", folder / "tight.toml")
    return limit


def test_a_recorded_limit_holds_for_plans_made_again(folder: Path, tight: int) -> None:
    pin, model = ("up.bias", "[64]"), f"{folder / 'mlp.py'}:model"
    file, again = folder / "fixed.toml", folder / "again.toml"
    fixed = ("--memory", f"{tight}B", "--pin", "=".join(pin))
    run("plan", model, "--mesh", MESH, *fixed, "-o", file)
    made = Plan.load(file)
    assert made.stage.limit == tight
    free = planned(*pin).predicted
    assert free.peak_bytes > tight >= made.predicted.peak_bytes
    run("plan", model, "--mesh", MESH, "--from", file, "-o", again)
    assert Plan.load(again).stage.limit == made.stage.limit
    assert Plan.load(again).stage.nodes == made.stage.nodes
    run("plan", model, "--mesh", MESH, "--from", file, "--memory", "1GB", "-o", again)
    assert Plan.load(again).stage.limit == 1e9
    step = Plan.load(again).predicted.step_seconds
    assert step == pytest.approx(free.step_seconds, rel=1e-9)
    assert step < made.predicted.step_seconds


def test_runners_up_keep_a_recorded_limit(ask: Callable[..., Any], tight: int) -> None:
    (answer,) = ask("why", "up.weight", "-n", 1, plan="tight.toml")
    assert len(answer["others"]) == 1
    for other in answer["others"]:
        after = {f["name"]: f["after"] for f in other["difference"]["figures"]}
        before = {f["name"]: f["before"] for f in other["difference"]["figures"]}
        assert before == pytest.approx(shown(planned(memory=tight)), rel=1e-9)
        found = planned("up.weight", other["layouts"].partition(" -sum(")[0], tight)
        assert after["step_seconds"] == pytest.approx(found.predicted.step_seconds, rel=1e-6)
        assert after["peak_bytes"] <= tight


def test_why_not_keeps_a_recorded_limit(ask: Callable[..., Any], tight: int) -> None:
    whole = "[64, 16] => [64, 16]"
    allowed = ask("why-not", "up.weight", "[64@gpu, 16]", plan="tight.toml")
    found = planned("up.weight", "[64@gpu, 16]", tight)
    after = {f["name"]: f["after"] for f in allowed["difference"]["figures"]}
    assert allowed["fits"]
    assert after == pytest.approx(shown(found), rel=1e-9)
    limit = int(too_little(whole))
    assert limit < tight  # so a lower limit, which --memory gives, is what refuses
    refused = ask("why-not", "up.weight", whole, "--memory", f"{limit}B", plan="tight.toml")
    assert not refused["fits"]
    assert ask("why-not", "up.weight", whole, plan="tight.toml")["fits"]

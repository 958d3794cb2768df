"""`autopar why` prices every form of attention, as planning with a pin on it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.mesh import Mesh
from autopar.operators.forms import forms_of
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.cli.test_commands import run

MESH = "toy[1TFLOP/s 1GB 100GB/s]: cp=2 @10GB/s 1us"
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in self.into(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = Heads()

    def forward(self, x):
        return self.heads(x).square().sum()

def model():
    return Model(), {"x": torch.zeros(1, 256, 8)}
"""


def test_every_form_has_its_price_or_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "heads.py").write_text(MODEL)
    model, plan = f"{tmp_path / 'heads.py'}:model", tmp_path / "plan.toml"
    run("plan", model, "--mesh", MESH, "-o", plan)
    found = json.loads(run("why", plan, "heads", "--model", model, "--json").stdout)
    (decision,) = [entry for entry in found if entry["forms"]]
    space: dict[str, Any] = {}
    exec(MODEL, space)
    module, batch = space["model"]()
    graph = capture_graph(module, (), batch, Options(), Trace(None)).graph
    names = {form.name for form in forms_of(graph[decision["node"]].op)} | {"plain"}
    chosen = decision["layout"].partition(" by ")[2] or "plain"
    assert set(decision["forms"]) == names - {chosen}
    assert "two axes" in decision["forms"]["ulysses ring"]["missing"]
    priced = {name: it for name, it in decision["forms"].items() if it["difference"]}
    assert {"ring", "gathered", "ring zigzag"} <= set(priced) | {chosen}
    for name, answer in priced.items():
        options = Options(pins={f"%{decision['node']}": f"by {name}"})
        again = make_plan(graph, Mesh.parse(MESH), options, Trace(None))
        assert step(answer) == pytest.approx(again.predicted.step_seconds, rel=1e-9)
    # Under a causal mask, the last of n devices computes 2 - 1 / n of an equal share.
    busiest = {name: answer["busiest"] for name, answer in priced.items()}
    assert chosen == "ulysses"
    assert busiest["gathered"] == pytest.approx(1.5)
    assert 1.5 < busiest["ring"] < 1.52  # and merges two parts
    assert 1.0 < busiest["ring zigzag"] < 1.02
    text = run("why", plan, "heads", "--model", model).stdout
    assert all(name in text for name in names)
    assert "1.50 ×" in text
    text = run("why-not", plan, "heads", "by gathered", "--model", model).stdout
    assert "does 1.50 × an equal share of this operator's work, instead of 1.00 ×" in text
    pinned = tmp_path / "pinned.toml"
    run("plan", model, "--mesh", MESH, "--form", "heads=ring", "-o", pinned)
    (other,) = json.loads(run("why", pinned, "%scaled*", "--model", model, "--json").stdout)
    steps = {name: step(answer) for name, answer in priced.items() if name != "ring"}
    assert {name: step(other["forms"][name]) for name in steps} == pytest.approx(steps)
    assert set(other["forms"]) == names - {"ring"}
    text = run("why-not", pinned, "heads", "by gathered", "--model", model).stdout
    assert "It is faster than the plan: the plan's own pins give another form." in text


def step(answer: dict[str, Any]) -> float:
    """Returns the predicted seconds of a step with a form."""
    figures = {figure["name"]: figure["after"] for figure in answer["difference"]["figures"]}
    return float(figures["step_seconds"])
